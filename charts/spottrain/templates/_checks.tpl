{{/* What the schema can't check, or refuses with words that nobody understands. Each failure is a sentence. */}}
{{- define "spottrain.checks" -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]*$" .Release.Name) }}
{{- fail (printf "The release is named %q, with which the name of its Service can't start. Begin with a letter, and write letters in lower case, digits and hyphens." .Release.Name) }}
{{- end }}
{{- $segment := "[a-z0-9]+([._-]+[a-z0-9]+)*" }}
{{- with .Values.image }}
{{- if not (regexMatch (printf "^(([A-Za-z0-9.-]+|\\[[0-9A-Fa-f:]+\\])(:[0-9]+)?/)?%s(/%s)*$" $segment $segment) .repository) }}
{{- fail (printf "image.repository: %q is not the name of an image. Write it in lower case and without a tag, such as registry.example/team/spottrain-operator; the tag belongs to image.tag." .repository) }}
{{- end }}
{{- if not (regexMatch "^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$" (.tag | default "")) }}
{{- fail (printf "image.tag: %q is not a tag. Write what follows the colon, such as 0.1.0; a digest belongs to image.digest." .tag) }}
{{- end }}
{{- if not (regexMatch "^(sha256:[0-9a-f]{64})?$" (.digest | default "")) }}
{{- fail (printf "image.digest: %q is not a digest. Write what the registry printed when the image was pushed: sha256: and 64 hexadecimal digits." .digest) }}
{{- end }}
{{- end }}
{{- include "spottrain.checkPorts" .Values.operator }}
{{- include "spottrain.checkOnlyOperator" . }}
{{- end }}

{{- define "spottrain.checkPorts" -}}
{{- $taken := dict }}
{{- range $name := list "port" "healthPort" "metricsPort" }}
{{- $port := index $ $name | int | toString }}
{{- if and (hasKey $taken $port) (ne $port "0") }}
{{- fail (printf "operator.%s and operator.%s are both %s. Choose another port for one of them." (get $taken $port) $name $port) }}
{{- end }}
{{- $_ := set $taken $port $name }}
{{- end }}
{{- end }}

{{/* A value with a unit, as Prometheus reads it. Takes name and value. */}}
{{- define "spottrain.checkDuration" -}}
{{- if not (regexMatch "^([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?$" .value | and .value) }}
{{- fail (printf "%s: %q is not a duration. Write numbers with units, such as 15s or 1m30s." .name .value) }}
{{- end }}
{{- end }}

{{/* Something that needs the API of another project. Takes root, name (the value that asks for it), api and project. */}}
{{- define "spottrain.checkApi" -}}
{{- if and (include "spottrain.isLive" .root) (not (.root.Capabilities.APIVersions.Has .api)) }}
{{- fail (printf "%s needs %s of %s, which this cluster does not have. Install %s first, or set %s=false." .name (splitList "/" .api | last) .project .project .name) }}
{{- end }}
{{- end }}

{{/* Whether two values of watchNamespaces may have a namespace in common, as Scope.overlaps has it. Takes ours and theirs. */}}
{{- define "spottrain.overlap" -}}
{{- $overlap := true }}
{{- if and .ours.names .theirs.names }}
{{- $overlap = false }}
{{- range .ours.names }}{{ if has . $.theirs.names }}{{ $overlap = true }}{{ end }}{{ end }}
{{- else }}
{{- range $key, $value := .ours.labels }}
{{- if ne (dig $key $value ($.theirs.labels | default dict)) $value }}{{ $overlap = false }}{{ end }}
{{- end }}
{{- end }}
{{- if $overlap }}true{{ end }}
{{- end }}

{{/* Two operators that lead one namespace would create pods for the same jobs. Those of one namespace share a lease. */}}
{{- define "spottrain.checkOnlyOperator" -}}
{{- if and .Values.watchNamespaces.names .Values.watchNamespaces.labels }}
{{- fail "watchNamespaces: names and labels are both set. Give a list of names, or the labels of a selector." }}
{{- end }}
{{- $crd := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "trainingjobs.spottrain.dev" }}
{{- $ofCrd := dig "metadata" "annotations" dict $crd }}
{{- $owner := print (get $ofCrd "meta.helm.sh/release-namespace") "/" (get $ofCrd "meta.helm.sh/release-name") }}
{{- range (lookup "rbac.authorization.k8s.io/v1" "ClusterRoleBinding" "" "").items }}
{{- $labels := .metadata.labels | default dict }}
{{- $theirs := get (.metadata.annotations | default dict) "spottrain.dev/watched-namespaces" | default "{}" | fromJson }}
{{- if and (eq (print (get $labels "app.kubernetes.io/name") "/" (get $labels "app.kubernetes.io/component")) "spottrain/operator") (hasSuffix "-operator" .metadata.name) }}
{{- $release := get $labels "app.kubernetes.io/instance" }}
{{- $namespace := (first .subjects).namespace }}
{{- $others := ne (print $namespace "/" $release) (print $.Release.Namespace "/" $.Release.Name) }}
{{- if and $others (or (eq $namespace $.Release.Namespace) (include "spottrain.overlap" (dict "ours" $.Values.watchNamespaces "theirs" $theirs))) }}
{{- fail (printf "The release %s in the namespace %s runs an operator in this cluster. One operator leads the jobs of a namespace: give each release a namespace of its own and, by watchNamespaces, other namespaces of jobs. Or upgrade that release, or remove it first with `helm uninstall %s --namespace %s`. Jobs keep training meanwhile." $release $namespace $release $namespace) }}
{{- end }}
{{- if and $others $.Values.crds.enabled (eq $owner (print $namespace "/" $release)) }}
{{- fail (printf "crds.enabled: the release %s in the namespace %s installs the CRDs of this cluster, which all releases share. Set crds.enabled=false for this release." $release $namespace) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
