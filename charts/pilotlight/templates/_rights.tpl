{{/* What an autoscaler may do with documents and with what is adopted, in the cluster or in its namespace. */}}
{{- define "pilotlight.documentRules" -}}
- {apiGroups: [pilotlight.dev], resources: [models{{ if include "pilotlight.cluster" . }}, tenants{{ end }}], verbs: [get, list, watch]}
- {apiGroups: [pilotlight.dev], resources: [models/status], verbs: [get, patch]}
- {apiGroups: [""], resources: [events], verbs: [create, patch]}
{{- if .Values.adoption.kubeai }}
- {apiGroups: [kubeai.org], resources: [models], verbs: [get, list, watch]}
{{- end }}
{{- if .Values.adoption.enabled }}
- {apiGroups: [apps], resources: [deployments, statefulsets], verbs: [get, list, watch]}
- {apiGroups: [apps], resources: [deployments/scale, statefulsets/scale], verbs: [get, patch]}
- {apiGroups: [autoscaling], resources: [horizontalpodautoscalers], verbs: [list, watch]}
- {apiGroups: [keda.sh], resources: [scaledobjects], verbs: [list, watch]}
{{- if include "pilotlight.cluster" . }}
- {apiGroups: [""], resources: [pods], verbs: [patch]}   # which pod of an adopted Deployment goes first
{{- end }}
{{- end }}
{{- end -}}
