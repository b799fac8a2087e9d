{{/* What an autoscaler may do with documents, in the cluster or in its namespace. */}}
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

{{/* What it may do with workloads that others made, everywhere or in one namespace. */}}
{{- define "pilotlight.adoptionRules" -}}
- {apiGroups: [apps], resources: [deployments, statefulsets], verbs: [get, list, watch]}
- {apiGroups: [apps], resources: [deployments/scale, statefulsets/scale], verbs: [get, patch]}
- {apiGroups: [apps], resources: [deployments/status, statefulsets/status], verbs: [patch]}   # one condition of ours
- {apiGroups: [autoscaling], resources: [horizontalpodautoscalers], verbs: [list, watch]}
- {apiGroups: [keda.sh], resources: [scaledobjects], verbs: [list, watch]}
{{- if include "pilotlight.cluster" . }}
- {apiGroups: [""], resources: [pods], verbs: [patch]}   # which pod of an adopted Deployment goes first
- {apiGroups: [""], resources: [events], verbs: [list]}   # why a pod waits for a volume
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

{{/* What providers of more capacity may do in the whole cluster. */}}
{{- define "pilotlight.capacityRules" -}}
{{- $kinds := include "pilotlight.capacityKinds" . | splitList " " -}}
{{- if has "cro" $kinds }}
# GPUs of a fabric, by the composable resource operator
- {apiGroups: [cro.hpsys.ibm.ie.com], resources: [composabilityrequests], verbs: [list, watch, create, patch, delete]}
- {apiGroups: [cro.hpsys.ibm.ie.com], resources: [composableresources], verbs: [list, watch, patch]}
{{- end }}
{{- if has "publish" $kinds }}
# what a fabric could attach is shown to everybody's claims, and they are told what became of theirs
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
# annotations: a node of Karpenter is not empty while it starts, and none goes with what is attached to it
- {apiGroups: [""], resources: [nodes], verbs: [patch]}
{{- end }}
{{- if . | include "pilotlight.capacityKinds" }}
# groups of machines that grow, by whomever: what they bring is not ordered again
- {apiGroups: [cluster.x-k8s.io], resources: [machinedeployments, machinesets], verbs: [list]}
- {apiGroups: [machine.openshift.io], resources: [machinesets], verbs: [list]}
{{- end }}
{{- end -}}

{{/* And in the engines' namespace. */}}
{{- define "pilotlight.capacityEnginesRules" -}}
{{- $kinds := include "pilotlight.capacityKinds" . | splitList " " -}}
{{- if has "kueue" $kinds }}
# what a queue of Kueue says of us
- {apiGroups: [kueue.x-k8s.io], resources: [localqueues, workloads], verbs: [get]}
{{- end }}
{{- if has "provisioningRequest" $kinds }}
# nodes, by ProvisioningRequests
- {apiGroups: [autoscaling.x-k8s.io], resources: [provisioningrequests], verbs: [get, list, create, patch, delete]}
- {apiGroups: [""], resources: [podtemplates], verbs: [get, list, create, delete]}
{{- end }}
{{- end -}}

{{/* What they may do in the release's own namespace. */}}
{{- define "pilotlight.capacityHomeRules" -}}
{{- $kinds := include "pilotlight.capacityKinds" . | splitList " " -}}
{{- if compact $kinds }}
# what they took, for who leads next
- {apiGroups: [""], resources: [configmaps], verbs: [create]}
- {apiGroups: [""], resources: [configmaps], resourceNames: [pilotlight-learnt], verbs: [get, patch]}
{{- end }}
{{- if has "redfish" $kinds }}
# whose a fabric's blocks are, where it does not keep that itself
- {apiGroups: [""], resources: [configmaps], resourceNames: [pilotlight-fabric], verbs: [get, patch]}
{{- end }}
{{- end -}}

{{/* Secrets that providers of more capacity need, one in a line: mounted, since no right to read Secrets is given. */}}
{{- define "pilotlight.capacitySecrets" -}}
{{- range (dig "capacity" list .Values.settings) }}
{{ dig "redfish" "secretRef" "" . }}
{{- end }}
{{- end -}}

