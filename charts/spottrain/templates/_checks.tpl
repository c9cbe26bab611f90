{{/* What the schema can't check, or refuses with words that nobody understands. Each failure is a sentence. */}}
{{- define "spottrain.checks" -}}
{{- $segment := "[a-z0-9]+([._-]+[a-z0-9]+)*" }}
{{- with .Values.image }}
{{- if not (regexMatch (printf "^([A-Za-z0-9.-]+(:[0-9]+)?/)?%s(/%s)*$" $segment $segment) .repository) }}
{{- fail (printf "image.repository: %q is not the name of an image. Write it in lower case and without a tag, such as registry.example/team/spottrain-operator; the tag belongs to image.tag." .repository) }}
{{- end }}
{{- if not (regexMatch "^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$" (.tag | default "")) }}
{{- fail (printf "image.tag: %q is not a tag. Write what follows the colon, such as 0.1.0; digests are not supported." .tag) }}
{{- end }}
{{- end }}
{{- end }}

{{/* A value with a unit, as Prometheus reads it. Takes name and value. */}}
{{- define "spottrain.checkDuration" -}}
{{- if not (regexMatch "^([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?$" .value | and .value) }}
{{- fail (printf "%s: %q is not a duration. Write numbers with units, such as 15s or 1m30s." .name .value) }}
{{- end }}
{{- end }}
