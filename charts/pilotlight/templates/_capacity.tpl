{{/* All kinds of capacity providers. */}}
{{- define "pilotlight.capacityKnown" -}}
cro redfish karpenter clusterAutoscaler provisioningRequest kueue
{{- end -}}

{{/* Kinds of providers in Settings, sorted and unique, and `publish` if a fabric has the key: with `publish: false`,
     published devices must still be removed. */}}
{{- define "pilotlight.capacityKinds" -}}
{{- $kinds := list }}
{{- $known := include "pilotlight.capacityKnown" . | splitList " " }}
{{- range (dig "capacity" list .Values.settings) }}
{{- range $key := keys . }}
{{- if has $key $known }}{{ $kinds = append $kinds $key }}{{ end }}
{{- end }}
{{- if hasKey (dig "redfish" dict .) "publish" }}{{ $kinds = append $kinds "publish" }}{{ end }}
{{- end }}
{{- $kinds | uniq | sortAlpha | join " " }}
{{- end -}}

{{/* Empty; fails if an autoscaler would not start with these Settings. */}}
{{- define "pilotlight.capacityChecked" -}}
{{- $known := include "pilotlight.capacityKnown" . | splitList " " -}}
{{- $names := list -}}
{{- range (dig "capacity" list .Values.settings) -}}
{{- $name := dig "name" "" . -}}
{{- if not (include "pilotlight.cluster" $) -}}
{{- fail "scope namespace: settings.capacity: remove it: providers need permissions in the whole cluster" -}}
{{- end -}}
{{- if or (not $name) (has $name $names) -}}
{{- fail (printf "settings.capacity: %s: each entry needs a unique name" (quote $name)) -}}
{{- end -}}
{{- $names = append $names $name -}}
{{- $kinds := list -}}
{{- range $key := keys . | sortAlpha -}}{{- if has $key $known -}}{{- $kinds = append $kinds $key -}}{{- end -}}{{- end -}}
{{- if ne (len $kinds) 1 -}}
{{- fail (printf "settings.capacity: %s: expected exactly one of %s; found %s" $name (join ", " $known) (join " and " $kinds | default "none")) -}}
{{- end -}}
{{- if hasKey . "redfish" -}}
{{- if not (regexMatch "^[A-Za-z0-9._-]+$" $name) -}}
{{- fail (printf "settings.capacity: %s: name: expected only letters, digits, '.', '_' and '-': the name is also a ConfigMap key" $name) -}}
{{- end -}}
{{- if not (regexMatch "^https://([A-Za-z0-9][A-Za-z0-9._-]*|\\[[0-9A-Fa-f:.]+\\])(:(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3}))?/?$" (dig "redfish" "url" "" .)) -}}
{{- fail (printf "settings.capacity: %s: redfish.url: expected https://HOST or https://HOST:PORT, without a user, a path or a query" $name) -}}
{{- end -}}
{{- end -}}
{{- if and (dig "headroom" 0 .) (has (first $kinds) (list "provisioningRequest" "kueue")) -}}
{{- fail (printf "settings.capacity: %s: headroom: queues do not support it: remove it" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
