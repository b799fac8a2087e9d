{{/* Permissions of autoscalers for documents, in the cluster or in the release's namespace. */}}
{{- define "pilotlight.documentRules" -}}
- {apiGroups: [pilotlight.dev], resources: [models{{ if include "pilotlight.cluster" . }}, tenants{{ end }}], verbs: [get, list, watch]}
- {apiGroups: [pilotlight.dev], resources: [models/status], verbs: [get, patch]}
- {apiGroups: [""], resources: [events], verbs: [create, patch]}
# which installation serves the Models of a namespace
- {apiGroups: [coordination.k8s.io], resources: [leases], verbs: [create]}
- {apiGroups: [coordination.k8s.io], resources: [leases], resourceNames: [models.pilotlight.dev], verbs: [get, list, update]}
{{- if .Values.adoption.kubeai }}
- {apiGroups: [kubeai.org], resources: [models], verbs: [get, list, watch]}
{{- end }}
{{- end -}}

{{/* Permissions for adopted workloads, in all namespaces or in one. */}}
{{- define "pilotlight.adoptionRules" -}}
- {apiGroups: [apps], resources: [deployments, statefulsets], verbs: [get, list, watch]}
- {apiGroups: [apps], resources: [deployments/scale, statefulsets/scale], verbs: [get, patch]}
- {apiGroups: [apps], resources: [deployments/status, statefulsets/status], verbs: [patch]}   # Pilotlight's condition
- {apiGroups: [autoscaling], resources: [horizontalpodautoscalers], verbs: [list, watch]}
- {apiGroups: [keda.sh], resources: [scaledobjects], verbs: [list, watch]}
{{- if include "pilotlight.cluster" . }}
- {apiGroups: [""], resources: [pods], verbs: [patch]}   # which pod of an adopted Deployment is deleted first
- {apiGroups: [""], resources: [events], verbs: [list]}   # why a pod waits for a volume
{{- end }}
{{- end -}}

{{/* Namespaces of adopted workloads, one per line. */}}
{{- define "pilotlight.adoptedIn" -}}
{{- range uniq .Values.adoption.namespaces }}
{{- if not (or (include "pilotlight.cluster" $) (eq . $.Release.Namespace)) }}
{{- fail "scope namespace: adoption.namespaces may contain only the release's namespace" }}
{{- end }}
{{ . }}
{{- end }}
{{- end -}}

{{/* Whether workloads are adopted in all namespaces. */}}
{{- define "pilotlight.adoptsAll" -}}
{{- if .Values.adoption.everywhere }}
{{- if not (include "pilotlight.cluster" .) }}
{{- fail "scope namespace: adoption.everywhere is not possible: add the release's namespace to adoption.namespaces" }}
{{- end -}}
true
{{- end }}
{{- end -}}

{{/* The same as arguments of the autoscaler. */}}
{{- define "pilotlight.adoptionWords" -}}
{{- if not (include "pilotlight.adoptsAll" .) }}
{{- range (include "pilotlight.adoptedIn" . | trim | splitList "\n" | compact) }}
- --adopt-in={{ . }}
{{- else }}
- --no-adoption
{{- end }}
{{- end }}
{{- end -}}

{{/* Cluster-wide permissions for capacity providers. */}}
{{- define "pilotlight.capacityRules" -}}
{{- $kinds := include "pilotlight.capacityKinds" . | splitList " " -}}
{{- if has "cro" $kinds }}
# GPUs of a fabric, by the composable resource operator
- {apiGroups: [cro.hpsys.ibm.ie.com], resources: [composabilityrequests], verbs: [list, watch, create, patch, delete]}
- {apiGroups: [cro.hpsys.ibm.ie.com], resources: [composableresources], verbs: [list, watch, patch]}
{{- end }}
{{- if has "publish" $kinds }}
# attachable devices are published, and the status of claims is written
- {apiGroups: [resource.k8s.io], resources: [resourceslices], verbs: [create, patch, delete]}
- {apiGroups: [resource.k8s.io], resources: [resourceclaims], verbs: [get]}
- {apiGroups: [resource.k8s.io], resources: [resourceclaims/status], verbs: [patch]}
- {apiGroups: [resource.k8s.io], resources: [resourceclaims/driver], resourceNames: [fabric.pilotlight.dev], verbs: ["arbitrary-node:patch"]}
{{- end }}
{{- if has "karpenter" $kinds }}
# nodes, by Karpenter
- {apiGroups: [karpenter.sh], resources: [nodepools], verbs: [get]}
- {apiGroups: [karpenter.sh], resources: [nodeclaims], verbs: [get, list, create, patch, delete]}
{{- end }}
{{- if or (has "cro" $kinds) (has "karpenter" $kinds) (has "redfish" $kinds) }}
# annotations that protect starting Karpenter nodes, and nodes with attached devices, from removal
- {apiGroups: [""], resources: [nodes], verbs: [patch]}
{{- end }}
{{- if . | include "pilotlight.capacityKinds" }}
# growing machine groups: their nodes are not ordered a second time
- {apiGroups: [cluster.x-k8s.io], resources: [machinedeployments, machinesets], verbs: [list]}
- {apiGroups: [machine.openshift.io], resources: [machinesets], verbs: [list]}
{{- end }}
{{- end -}}

{{/* The same in the engines' namespace. */}}
{{- define "pilotlight.capacityEnginesRules" -}}
{{- $kinds := include "pilotlight.capacityKinds" . | splitList " " -}}
{{- if has "kueue" $kinds }}
# state of Kueue's queues and Workloads
- {apiGroups: [kueue.x-k8s.io], resources: [localqueues, workloads], verbs: [get]}
{{- end }}
{{- if has "provisioningRequest" $kinds }}
# nodes, by ProvisioningRequests
- {apiGroups: [autoscaling.x-k8s.io], resources: [provisioningrequests], verbs: [get, list, create, patch, delete]}
- {apiGroups: [""], resources: [podtemplates], verbs: [get, list, create, patch, delete]}
{{- end }}
{{- end -}}

{{/* The same in the release's namespace. */}}
{{- define "pilotlight.capacityHomeRules" -}}
{{- $kinds := include "pilotlight.capacityKinds" . | splitList " " -}}
{{- if compact $kinds }}
# learned delivery times, for the next leader
- {apiGroups: [""], resources: [configmaps], verbs: [create]}
- {apiGroups: [""], resources: [configmaps], resourceNames: [pilotlight-learnt], verbs: [get, patch]}
{{- end }}
{{- if has "redfish" $kinds }}
# whose a fabric's blocks are, where it does not keep that itself
- {apiGroups: [""], resources: [configmaps], resourceNames: [pilotlight-fabric], verbs: [get, patch]}
{{- end }}
{{- end -}}

{{/* Secrets of capacity providers, one per line. They are mounted, since autoscalers may not read Secrets. */}}
{{- define "pilotlight.capacitySecrets" -}}
{{- range (dig "capacity" list .Values.settings) }}
{{ dig "redfish" "secretRef" "" . }}
{{- end }}
{{- end -}}

