{{/* Written by `make docs` from deploy/rules. Do not edit. */}}
{{- define "sidestep.rules" -}}{{- end -}}
