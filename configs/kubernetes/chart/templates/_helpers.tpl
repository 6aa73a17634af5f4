{{- define "omni-proxy.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "omni-proxy.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "omni-proxy.labels" -}}
{{ include "omni-proxy.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* The config: what stands in values, under what the chart itself decides. */ -}}
{{- define "omni-proxy.config" -}}
{{- $discovery := dict "kubernetes" (dict "namespace" (default .Release.Namespace .Values.discovery.namespace) "selector" .Values.discovery.selector "endpoints" .Values.discovery.endpoints) }}
{{- $own := dict "listen" (dict "host" "0.0.0.0" "port" 8000) "discovery" $discovery }}
{{- if .Values.redis }}{{- $_ := set $own "replicas" (dict "redis" .Values.redis "group" .Release.Name) }}{{- end }}
{{- if .Values.admin.enabled }}
{{- $_ := set $own "admin" (dict "host" "0.0.0.0" "port" .Values.admin.port "token" "file:/etc/omni-proxy-secrets/token") }}
{{- end }}
{{- toYaml (mergeOverwrite (deepCopy .Values.config) $own) }}
{{- end }}
