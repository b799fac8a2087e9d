{{/* Common parts of all pods, which satisfy the pod security standard `restricted`. */}}

{{- define "pilotlight.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "pilotlight.program" -}}
image: {{ include "pilotlight.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: {{ toJson .Values.image.command }}
{{- end -}}

{{- define "pilotlight.container" -}}
{{ include "pilotlight.program" . }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "pilotlight.env" -}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
{{- end -}}

{{- define "pilotlight.restricted" -}}
securityContext:
  runAsNonRoot: true
  {{- if not .Values.openshift }}
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  {{- end }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end -}}

{{/* (root, component, its values) -> labels of its pods. Selector labels take precedence. */}}
{{- define "pilotlight.podLabels" -}}
{{- merge (include "pilotlight.labels" . | fromYaml) (index . 2).podLabels | toYaml -}}
{{- end -}}

{{/* (root, component, its values) -> scheduling of its pods, spread over nodes and zones. */}}
{{- define "pilotlight.placement" -}}
{{- $values := index . 2 -}}
nodeSelector: {{ toJson (merge (dict "kubernetes.io/os" "linux") $values.nodeSelector) }}
{{- with $values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with $values.affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
topologySpreadConstraints:
  {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {matchLabels: {{ include "pilotlight.selector" $ | fromYaml | toJson }}}
    matchLabelKeys: [pod-template-hash]
  {{- end }}
{{- end -}}

{{/* Probes on the health port, which serves only liveness, readiness and metrics. */}}
{{- define "pilotlight.health" -}}
livenessProbe: {httpGet: {path: /healthz, port: health}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
readinessProbe: {httpGet: {path: /readyz, port: health}, periodSeconds: 1, timeoutSeconds: 2}
{{- end -}}
