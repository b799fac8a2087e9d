"""The Kubernetes types that a Model's `pod` contains, without descriptions. Pure data.

Each field has a type of this table or `string`, `bool`, `int32`, `int64`, `Quantity`. `[]` marks a list and `{}` a map;
`!` after the name of a field marks a required field. Source: k8s.io/api v0.36.3, core/v1. A test against a real API
server compares the table with that server's OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TYPES: Final[Mapping[str, Mapping[str, str]]] = {
    "Affinity": {"podAffinity": "PodAffinity", "podAntiAffinity": "PodAntiAffinity"},
    "AWSElasticBlockStoreVolumeSource": {
        "volumeID!": "string", "fsType": "string", "partition": "int32", "readOnly": "bool"
    },
    "AppArmorProfile": {"type!": "string", "localhostProfile": "string"},
    "AzureDiskVolumeSource": {
        "diskName!": "string", "diskURI!": "string", "cachingMode": "string", "fsType": "string", "readOnly": "bool",
        "kind": "string"
    },
    "AzureFileVolumeSource": {"secretName!": "string", "shareName!": "string", "readOnly": "bool"},
    "CSIVolumeSource": {
        "driver!": "string", "readOnly": "bool", "fsType": "string", "volumeAttributes": "string{}",
        "nodePublishSecretRef": "LocalObjectReference"
    },
    "CephFSVolumeSource": {
        "monitors!": "string[]", "path": "string", "user": "string", "secretFile": "string",
        "secretRef": "LocalObjectReference", "readOnly": "bool"
    },
    "CinderVolumeSource": {
        "volumeID!": "string", "fsType": "string", "readOnly": "bool", "secretRef": "LocalObjectReference"
    },
    "ClusterTrustBundleProjection": {
        "name": "string", "signerName": "string", "labelSelector": "LabelSelector", "optional": "bool",
        "path!": "string"
    },
    "ConfigMapProjection": {"name": "string", "items": "KeyToPath[]", "optional": "bool"},
    "ConfigMapVolumeSource": {"name": "string", "items": "KeyToPath[]", "defaultMode": "int32", "optional": "bool"},
    "DownwardAPIProjection": {"items": "DownwardAPIVolumeFile[]"},
    "DownwardAPIVolumeFile": {
        "path!": "string", "fieldRef": "ObjectFieldSelector", "resourceFieldRef": "ResourceFieldSelector",
        "mode": "int32"
    },
    "DownwardAPIVolumeSource": {"items": "DownwardAPIVolumeFile[]", "defaultMode": "int32"},
    "EmptyDirVolumeSource": {"medium": "string", "sizeLimit": "Quantity"},
    "EphemeralVolumeSource": {"volumeClaimTemplate": "PersistentVolumeClaimTemplate"},
    "FCVolumeSource": {
        "targetWWNs": "string[]", "lun": "int32", "fsType": "string", "readOnly": "bool", "wwids": "string[]"
    },
    "FlexVolumeSource": {
        "driver!": "string", "fsType": "string", "secretRef": "LocalObjectReference", "readOnly": "bool",
        "options": "string{}"
    },
    "FlockerVolumeSource": {"datasetName": "string", "datasetUUID": "string"},
    "GCEPersistentDiskVolumeSource": {
        "pdName!": "string", "fsType": "string", "partition": "int32", "readOnly": "bool"
    },
    "GitRepoVolumeSource": {"repository!": "string", "revision": "string", "directory": "string"},
    "GlusterfsVolumeSource": {"endpoints!": "string", "path!": "string", "readOnly": "bool"},
    "HostPathVolumeSource": {"path!": "string", "type": "string"},
    "ISCSIVolumeSource": {
        "targetPortal!": "string", "iqn!": "string", "lun!": "int32", "iscsiInterface": "string", "fsType": "string",
        "readOnly": "bool", "portals": "string[]", "chapAuthDiscovery": "bool", "chapAuthSession": "bool",
        "secretRef": "LocalObjectReference", "initiatorName": "string"
    },
    "ImageVolumeSource": {"reference": "string", "pullPolicy": "string"},
    "KeyToPath": {"key!": "string", "path!": "string", "mode": "int32"},
    "LabelSelector": {"matchLabels": "string{}", "matchExpressions": "LabelSelectorRequirement[]"},
    "LabelSelectorRequirement": {"key!": "string", "operator!": "string", "values": "string[]"},
    "LocalObjectReference": {"name": "string"},
    "Metadata": {"annotations": "string{}", "labels": "string{}"},
    "NFSVolumeSource": {"server!": "string", "path!": "string", "readOnly": "bool"},
    "ObjectFieldSelector": {"apiVersion": "string", "fieldPath!": "string"},
    "PersistentVolumeClaimSpec": {
        "accessModes": "string[]", "selector": "LabelSelector", "resources": "VolumeResourceRequirements",
        "volumeName": "string", "storageClassName": "string", "volumeMode": "string",
        "dataSource": "TypedLocalObjectReference", "dataSourceRef": "TypedObjectReference",
        "volumeAttributesClassName": "string"
    },
    "PersistentVolumeClaimTemplate": {"metadata": "Metadata", "spec!": "PersistentVolumeClaimSpec"},
    "PersistentVolumeClaimVolumeSource": {"claimName!": "string", "readOnly": "bool"},
    "PhotonPersistentDiskVolumeSource": {"pdID!": "string", "fsType": "string"},
    "PodAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": "PodAffinityTerm[]",
        "preferredDuringSchedulingIgnoredDuringExecution": "WeightedPodAffinityTerm[]"
    },
    "PodAffinityTerm": {
        "labelSelector": "LabelSelector", "namespaces": "string[]", "topologyKey!": "string",
        "namespaceSelector": "LabelSelector", "matchLabelKeys": "string[]", "mismatchLabelKeys": "string[]"
    },
    "PodAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": "PodAffinityTerm[]",
        "preferredDuringSchedulingIgnoredDuringExecution": "WeightedPodAffinityTerm[]"
    },
    "PodCertificateProjection": {
        "signerName!": "string", "keyType!": "string", "maxExpirationSeconds": "int32",
        "credentialBundlePath": "string", "keyPath": "string", "certificateChainPath": "string",
        "userAnnotations": "string{}"
    },
    "PodSecurityContext": {
        "seLinuxOptions": "SELinuxOptions", "windowsOptions": "WindowsSecurityContextOptions", "runAsUser": "int64",
        "runAsGroup": "int64", "runAsNonRoot": "bool", "supplementalGroups": "int64[]",
        "supplementalGroupsPolicy": "string", "fsGroup": "int64", "sysctls": "Sysctl[]",
        "fsGroupChangePolicy": "string", "seccompProfile": "SeccompProfile", "appArmorProfile": "AppArmorProfile",
        "seLinuxChangePolicy": "string"
    },
    "PortworxVolumeSource": {"volumeID!": "string", "fsType": "string", "readOnly": "bool"},
    "ProjectedVolumeSource": {"sources": "VolumeProjection[]", "defaultMode": "int32"},
    "QuobyteVolumeSource": {
        "registry!": "string", "volume!": "string", "readOnly": "bool", "user": "string", "group": "string",
        "tenant": "string"
    },
    "RBDVolumeSource": {
        "monitors!": "string[]", "image!": "string", "fsType": "string", "pool": "string", "user": "string",
        "keyring": "string", "secretRef": "LocalObjectReference", "readOnly": "bool"
    },
    "ResourceFieldSelector": {"containerName": "string", "resource!": "string", "divisor": "Quantity"},
    "SELinuxOptions": {"user": "string", "role": "string", "type": "string", "level": "string"},
    "ScaleIOVolumeSource": {
        "gateway!": "string", "system!": "string", "secretRef!": "LocalObjectReference", "sslEnabled": "bool",
        "protectionDomain": "string", "storagePool": "string", "storageMode": "string", "volumeName": "string",
        "fsType": "string", "readOnly": "bool"
    },
    "SeccompProfile": {"type!": "string", "localhostProfile": "string"},
    "SecretProjection": {"name": "string", "items": "KeyToPath[]", "optional": "bool"},
    "SecretVolumeSource": {"secretName": "string", "items": "KeyToPath[]", "defaultMode": "int32", "optional": "bool"},
    "ServiceAccountTokenProjection": {"audience": "string", "expirationSeconds": "int64", "path!": "string"},
    "StorageOSVolumeSource": {
        "volumeName": "string", "volumeNamespace": "string", "fsType": "string", "readOnly": "bool",
        "secretRef": "LocalObjectReference"
    },
    "Sysctl": {"name!": "string", "value!": "string"},
    "TypedLocalObjectReference": {"apiGroup": "string", "kind!": "string", "name!": "string"},
    "TypedObjectReference": {"apiGroup": "string", "kind!": "string", "name!": "string", "namespace": "string"},
    "Volume": {
        "name!": "string", "hostPath": "HostPathVolumeSource", "emptyDir": "EmptyDirVolumeSource",
        "gcePersistentDisk": "GCEPersistentDiskVolumeSource",
        "awsElasticBlockStore": "AWSElasticBlockStoreVolumeSource", "gitRepo": "GitRepoVolumeSource",
        "secret": "SecretVolumeSource", "nfs": "NFSVolumeSource", "iscsi": "ISCSIVolumeSource",
        "glusterfs": "GlusterfsVolumeSource", "persistentVolumeClaim": "PersistentVolumeClaimVolumeSource",
        "rbd": "RBDVolumeSource", "flexVolume": "FlexVolumeSource", "cinder": "CinderVolumeSource",
        "cephfs": "CephFSVolumeSource", "flocker": "FlockerVolumeSource", "downwardAPI": "DownwardAPIVolumeSource",
        "fc": "FCVolumeSource", "azureFile": "AzureFileVolumeSource", "configMap": "ConfigMapVolumeSource",
        "vsphereVolume": "VsphereVirtualDiskVolumeSource", "quobyte": "QuobyteVolumeSource",
        "azureDisk": "AzureDiskVolumeSource", "photonPersistentDisk": "PhotonPersistentDiskVolumeSource",
        "projected": "ProjectedVolumeSource", "portworxVolume": "PortworxVolumeSource",
        "scaleIO": "ScaleIOVolumeSource", "storageos": "StorageOSVolumeSource", "csi": "CSIVolumeSource",
        "ephemeral": "EphemeralVolumeSource", "image": "ImageVolumeSource"
    },
    "VolumeMount": {
        "name!": "string", "readOnly": "bool", "recursiveReadOnly": "string", "mountPath!": "string",
        "subPath": "string", "mountPropagation": "string", "subPathExpr": "string"
    },
    "VolumeProjection": {
        "secret": "SecretProjection", "downwardAPI": "DownwardAPIProjection", "configMap": "ConfigMapProjection",
        "serviceAccountToken": "ServiceAccountTokenProjection", "clusterTrustBundle": "ClusterTrustBundleProjection",
        "podCertificate": "PodCertificateProjection"
    },
    "VolumeResourceRequirements": {"limits": "Quantity{}", "requests": "Quantity{}"},
    "VsphereVirtualDiskVolumeSource": {
        "volumePath!": "string", "fsType": "string", "storagePolicyName": "string", "storagePolicyID": "string"
    },
    "WeightedPodAffinityTerm": {"weight!": "int32", "podAffinityTerm!": "PodAffinityTerm"},
    "WindowsSecurityContextOptions": {
        "gmsaCredentialSpecName": "string", "gmsaCredentialSpec": "string", "runAsUserName": "string",
        "hostProcess": "bool"
    },
}  # fmt: skip
"""Type name -> its fields. `Affinity` lacks `nodeAffinity`, which a Model cannot set. `Metadata` has the fields of
ObjectMeta that a template of a PersistentVolumeClaim can set.
"""
