{{/* The image of a part: a list of the root and the name of the part. */}}
{{- define "adascale.image" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
{{- $values := index $root.Values $part -}}
{{- $registry := $root.Values.image.registry | trimSuffix "/" -}}
{{- $name := printf "adascale-%s:%s" $part ($root.Values.image.tag | default $root.Chart.AppVersion) -}}
{{- $values.image | default (ternary (printf "%s/%s" $registry $name) $name (ne $registry "")) -}}
{{- end -}}
