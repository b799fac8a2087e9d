{{/* Names, labels, and results of several values. */}}

{{- define "pilotlight.name" -}}
{{- $name := ternary .Release.Name (printf "%s-pilotlight" .Release.Name) (contains "pilotlight" .Release.Name) -}}
{{- include "pilotlight.cut" (list (.Values.fullnameOverride | default $name) 40) -}}
{{- end -}}

{{/* (text, length) -> the text; a longer one is truncated and ends in its hash, so that results are unique. */}}
{{- define "pilotlight.cut" -}}
{{- $text := index . 0 -}}
{{- $length := index . 1 | int -}}
{{- if le (len $text) $length -}}
{{- $text -}}
{{- else -}}
{{- printf "%s-%s" ($text | trunc (sub $length 9 | int) | trimSuffix "-") (sha256sum $text | trunc 8) -}}
{{- end -}}
{{- end -}}

{{/*
(root, component) -> the selector of its pods; must not change between upgrades. An umbrella chart may contain this chart
several times with an alias for each, which is then the name of the chart.
*/}}
{{- define "pilotlight.selector" -}}
{{- $root := index . 0 -}}
{{- $aliased := printf "%s_%s" $root.Release.Name $root.Chart.Name -}}
{{- $instance := ternary $root.Release.Name $aliased (eq $root.Chart.Name "pilotlight") -}}
app.kubernetes.io/name: pilotlight
app.kubernetes.io/instance: {{ include "pilotlight.cut" (list $instance 63) | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* root -> the selector of its agents, in a namespace that agents of other releases may share, also of the same name. */}}
{{- define "pilotlight.agentSelector" -}}
{{ include "pilotlight.selector" (list . "agent") }}
{{ include "pilotlight.identity" . }}
{{- end -}}

{{/* The label of the installation. Selectors of Deployments lack it, because they are immutable. */}}
{{- define "pilotlight.identity" -}}
pilotlight.dev/installation: {{ include "pilotlight.installation" . }}
{{- end -}}

{{/* (root, component) -> all labels of an object. */}}
{{- define "pilotlight.labels" -}}
{{ include "pilotlight.selector" . }}
{{ include "pilotlight.identity" (index . 0) }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end -}}

{{/* Name of a cluster-scoped object, with a hash of namespace and name: (team, a-x) differs from (team-a, x). */}}
{{- define "pilotlight.clusterName" -}}
{{- $name := include "pilotlight.name" . -}}
{{- $hash := printf "%s/%s" .Release.Namespace $name | sha256sum | trunc 8 -}}
{{- printf "%s-%s" (printf "%s-%s" .Release.Namespace $name | trunc 54 | trimAll "-") $hash -}}
{{- end -}}

{{/* Name of an object in the engines' namespace, which other releases may share. */}}
{{- define "pilotlight.enginesName" -}}
{{- if include "pilotlight.cluster" . }}{{ include "pilotlight.clusterName" . }}{{ else }}{{ include "pilotlight.name" . }}{{ end -}}
{{- end -}}

{{/* The installation label of created objects (`autoscaler.spec.installation_ownership.installation_id`). */}}
{{- define "pilotlight.installation" -}}
{{- printf "%s-%s" (trunc 40 .Release.Namespace) (printf "%s/%s" .Release.Namespace (include "pilotlight.name" .) | sha256sum | trunc 8) -}}
{{- end -}}

{{/* Name of an object in the agents' namespace. */}}
{{- define "pilotlight.agentsName" -}}
{{- if eq .Values.agent.namespace .Release.Namespace }}{{ include "pilotlight.name" . }}{{ else }}{{ include "pilotlight.clusterName" . }}{{ end -}}
{{- end -}}

{{- define "pilotlight.cluster" -}}
{{- if eq .Values.scope "cluster" }}yes{{ end -}}
{{- end -}}

{{- define "pilotlight.agents" -}}
{{- if and .Values.agent.enabled (include "pilotlight.cluster" .) }}yes{{ end -}}
{{- end -}}

{{/* Whether agents add and remove GPUs of a fabric; fails if the values do not allow it. */}}
{{- define "pilotlight.agentsFabric" -}}
{{- $asked := false -}}
{{- range (dig "capacity" list .Values.settings) -}}
{{- if dig "redfish" "agents" false . -}}{{- $asked = .name -}}{{- end -}}
{{- end -}}
{{- if .Values.agent.fabric.enabled -}}
{{- if not (include "pilotlight.cluster" .) -}}
{{- fail "scope namespace: agent.fabric.enabled is not possible: it needs root permissions on nodes" -}}
{{- end -}}
{{- if not .Values.agent.enabled -}}
{{- fail "agent.fabric.enabled: requires agent.enabled: true" -}}
{{- end -}}
yes
{{- else if $asked -}}
{{- fail (printf "settings.capacity: %s: redfish.agents requires agent.fabric.enabled: true, or no GPU is detached" $asked) -}}
{{- end -}}
{{- end -}}

{{/* Namespaces of the pods that agents restart, one per line. */}}
{{- define "pilotlight.restartedIn" -}}
{{- range .Values.agent.fabric.restart }}
{{ .namespace }}
{{- end }}
{{- end -}}

{{/* Whether agents use the API server. */}}
{{- define "pilotlight.agentsAsk" -}}
{{- if or .Values.agent.pullSecrets (include "pilotlight.agentsFabric" .) }}yes{{ end -}}
{{- end -}}

{{/* How engines mount weights (Settings `weights.mount`). */}}
{{- define "pilotlight.mount" -}}
{{- dig "weights" "mount" "auto" .Values.settings -}}
{{- end -}}

{{/* Whether volumes of nodes' stores are created. */}}
{{- define "pilotlight.volumes" -}}
{{- if and (include "pilotlight.agents" .) (has (include "pilotlight.mount" .) (list "auto" "volume")) }}yes{{ end -}}
{{- end -}}

{{/* Where agents keep weights on their nodes. */}}
{{- define "pilotlight.weightsStore" -}}
{{- .Values.agent.storePath | trimSuffix "/" }}/weights
{{- end -}}

{{/* Models may not run in the release's namespace: their pods could have the gateways' labels and receive requests and keys. */}}
{{- define "pilotlight.enginesNamespace" -}}
{{- if and (include "pilotlight.cluster" .) (eq .Values.engines.namespace .Release.Namespace) -}}
{{- fail (printf "engines.namespace: %s is the release's namespace: with scope cluster, set another namespace for the pods of Models" .Values.engines.namespace) -}}
{{- end -}}
{{- if include "pilotlight.cluster" . }}{{ .Values.engines.namespace }}{{ else }}{{ .Release.Namespace }}{{ end -}}
{{- end -}}

{{- define "pilotlight.cuttingNamespace" -}}
{{- dig "cutting" "namespace" "gpu-operator" .Values.settings -}}
{{- end -}}

{{- define "pilotlight.cuttingConfigMap" -}}
{{- dig "cutting" "configMap" "pilotlight-mig" .Values.settings -}}
{{- end -}}

{{- define "pilotlight.contractAuth" -}}
{{- if and (eq .Values.contract.auth "token") (not (include "pilotlight.cluster" .)) -}}
{{- fail "contract.auth: token requires scope: cluster, since TokenReview is a cluster permission: set certificate" -}}
{{- end -}}
{{- .Values.contract.auth | default (ternary "token" "certificate" (eq .Values.scope "cluster")) -}}
{{- end -}}

{{- define "pilotlight.contractHost" -}}
{{ include "pilotlight.name" . }}-autoscaler.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* Ports of DNS pods, in the form of a NetworkPolicy. OpenShift uses 5353. */}}
{{- define "pilotlight.dnsPorts" -}}
{{- $found := list -}}
{{- range (ternary (append .Values.networkPolicy.dnsPorts 5353) .Values.networkPolicy.dnsPorts .Values.openshift | uniq) -}}
{{- $found = append $found (dict "protocol" "UDP" "port" .) -}}
{{- $found = append $found (dict "protocol" "TCP" "port" .) -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* The DNS name in agents' certificates. */}}
{{- define "pilotlight.agentCertificate" -}}
pilotlight-agent
{{- end -}}

{{/* Whether agents have their own certificate; without contract.secret.agent they use the gateways'. */}}
{{- define "pilotlight.agentsCertified" -}}
{{- if or (ne .Values.contract.certificates "secret") .Values.contract.secret.agent }}yes{{ end -}}
{{- end -}}

{{/* (root, server|client|agent) -> the Secret with its certificates. */}}
{{- define "pilotlight.contractSecret" -}}
{{- $root := index . 0 -}}
{{- $side := index . 1 -}}
{{- if eq $root.Values.contract.certificates "secret" -}}
{{- if and (eq $side "agent") (not $root.Values.contract.secret.agent) }}{{ $side = "client" }}{{ end -}}
{{- required (printf "contract.secret.%s: set the name of the Secret, or contract.certificates: generated" $side) (index $root.Values.contract.secret $side) -}}
{{- else -}}
{{ include (ternary "pilotlight.agentsName" "pilotlight.name" (eq $side "agent")) $root }}-contract-{{ $side }}
{{- end -}}
{{- end -}}

{{/* The Secret with the certificate that agents use among themselves. */}}
{{- define "pilotlight.peersSecret" -}}
{{- .Values.agent.peers.secret | default (printf "%s-agent-peers" (include "pilotlight.agentsName" .)) -}}
{{- end -}}

{{/* PriorityClass of placeholder pods: one per release, the default in Settings. */}}
{{- define "pilotlight.placeholderClass" -}}
{{ include "pilotlight.clusterName" . }}-placeholder
{{- end -}}

{{- define "pilotlight.settings" -}}
{{- $settings := deepCopy .Values.settings -}}
{{- range (dig "capacity" list $settings) -}}
{{- if hasKey . "clusterAutoscaler" -}}
{{- $own := dict "priorityClass" (include "pilotlight.placeholderClass" $) -}}
{{- $_ := set . "clusterAutoscaler" (merge (.clusterAutoscaler | default dict) $own) -}}
{{- end -}}
{{- end -}}
{{- if .Values.openshift -}}
{{- /* engines set no user either; the security context constraint does */}}
{{- $own := dict "securityContext" (dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault")) -}}
{{- $_ := set $settings "pod" (merge ($settings.pod | default dict) (hasKey ($settings.pod | default dict) "securityContext" | ternary dict $own)) -}}
{{- end -}}
{{- merge (dict "apiVersion" "pilotlight.dev/v1alpha1" "kind" "Settings") $settings | toYaml -}}
{{- end -}}

{{/* A quantity of bytes (64Mi, 1G, 1000, auto) as a number. */}}
{{- define "pilotlight.bytes" -}}
{{- $text := toString . -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 -}}
{{- $unit := regexReplaceAll "^[0-9]+" $text "" -}}
{{- if eq $text "auto" -}}
0
{{- else if and (regexMatch "^[0-9]+" $text) (hasKey $units $unit) -}}
{{- mul (regexFind "^[0-9]+" $text | int64) (index $units $unit) -}}
{{- else -}}
{{- fail (printf "settings.limits: %s: expected a whole number with k, M, G, Ki, Mi or Gi" $text) -}}
{{- end -}}
{{- end -}}

{{/* Settings' limits for a gateway: names with underscores, sizes in bytes. */}}
{{- define "pilotlight.limits" -}}
{{- $found := dict -}}
{{- range $key, $value := .Values.settings.limits -}}
{{- $number := $value -}}
{{- if or (eq $key "bodyBytesMax") (eq $key "memoryBytes") -}}
{{- $number = include "pilotlight.bytes" (kindIs "float64" $value | ternary (printf "%.0f" (float64 (kindIs "float64" $value | ternary $value 0))) $value) | int64 -}}
{{- end -}}
{{- $_ := set $found (snakecase $key) $number -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* One of agent.trust -> its folder in /trust. */}}
{{- define "pilotlight.trustName" -}}
{{- .configMap | default .secret -}}
{{- end -}}

{{/* Empty; fails if Settings name a file in a folder that agents do not mount. */}}
{{- define "pilotlight.trusted" -}}
{{- $there := list -}}
{{- range .Values.agent.trust }}{{ $there = append $there (include "pilotlight.trustName" .) }}{{ end -}}
{{- if ne (len $there) (len (uniq $there)) -}}
{{- fail (printf "agent.trust: %s: expected each name once" (join ", " $there)) -}}
{{- end -}}
{{- $signatures := dig "weights" "signatures" dict .Values.settings -}}
{{- $named := prepend (dig "keys" list $signatures) (dig "trustedRoot" "" $signatures) -}}
{{- range prepend $named (dig "weights" "caFile" "" .Values.settings) -}}
{{- if and (hasPrefix "/trust/" .) (not (has (index (splitList "/" .) 2) $there)) -}}
{{- fail (printf "settings.weights: %s: add the ConfigMap %s to agent.trust" . (index (splitList "/" .) 2)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
