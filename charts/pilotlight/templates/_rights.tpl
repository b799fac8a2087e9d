{{/* What an autoscaler may do with documents, in the cluster or in its namespace. */}}
{{- define "pilotlight.documentRules" -}}
- {apiGroups: [pilotlight.dev], resources: [models{{ if include "pilotlight.cluster" . }}, tenants{{ end }}], verbs: [get, list, watch]}
- {apiGroups: [pilotlight.dev], resources: [models/status], verbs: [get, patch]}
- {apiGroups: [""], resources: [events], verbs: [create, patch]}
{{- if .Values.adoption.kubeai }}
- {apiGroups: [kubeai.org], resources: [models], verbs: [get, list, watch]}
{{- end }}
{{- end -}}

{{/* What it may do with workloads that others made, everywhere or in one namespace. */}}
{{- define "pilotlight.adoptionRules" -}}
- {apiGroups: [apps], resources: [deployments, statefulsets], verbs: [get, list, watch]}
- {apiGroups: [apps], resources: [deployments/scale, statefulsets/scale], verbs: [get, patch]}
- {apiGroups: [apps], resources: [deployments/status, statefulsets/status], verbs: [patch]}   # one condition of ours
- {apiGroups: [autoscaling], resources: [horizontalpodautoscalers], verbs: [list, watch]}
- {apiGroups: [keda.sh], resources: [scaledobjects], verbs: [list, watch]}
{{- if include "pilotlight.cluster" . }}
- {apiGroups: [""], resources: [pods], verbs: [patch]}   # which pod of an adopted Deployment goes first
{{- end }}
{{- end -}}

{{/* Which namespaces that is in, one in a line. */}}
{{- define "pilotlight.adoptedIn" -}}
{{- range uniq .Values.adoption.namespaces }}
{{- if not (or (include "pilotlight.cluster" $) (eq . $.Release.Namespace)) }}
{{- fail "scope namespace: adoption.namespaces can only have the release's own" }}
{{- end }}
{{ . }}
{{- end }}
{{- end -}}

{{/* Whether it is in all of them. */}}
{{- define "pilotlight.adoptsAll" -}}
{{- if .Values.adoption.everywhere }}
{{- if not (include "pilotlight.cluster" .) }}
{{- fail "scope namespace: adoption.everywhere is not possible; put the release's namespace into adoption.namespaces" }}
{{- end -}}
true
{{- end }}
{{- end -}}

{{/* The same as words of the autoscaler's command line. */}}
{{- define "pilotlight.adoptionWords" -}}
{{- if not (include "pilotlight.adoptsAll" .) }}
{{- range (include "pilotlight.adoptedIn" . | trim | splitList "\n" | compact) }}
- --adopt-in={{ . }}
{{- else }}
- --no-adoption
{{- end }}
{{- end }}
{{- end -}}
