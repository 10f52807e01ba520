{{/* What more than one template needs. Every vLLM argument comes through qdflash.container. */}}

{{- define "qdflash.selector" -}}
app.kubernetes.io/name: qdflash
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Longer, and Kubernetes cuts the names of a canary's pods, by which its series are told apart. */}}
{{- define "qdflash.metadata" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,34}[a-z0-9])?$" .Release.Name) }}
{{- fail (printf "name %s: small letters, digits and dashes, a letter first, 36 at most" .Release.Name) }}
{{- end -}}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "qdflash.selector" . | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
  helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "qdflash.container" -}}
image: {{ .Values.image }}
# In either mode: every file is compared with the checksums named here, then this process becomes vLLM.
command: [python, -m, components.serving.start]
args:
  {{- toYaml .Values.serving.args | nindent 2 }}
  - --shutdown-timeout
  - {{ .Values.drainSeconds | quote }}
  - --middleware
  - components.serving.drain.RefuseWhileDraining
  {{- if .Values.apiKey.secretName }}
  - --middleware
  - components.serving.key.KeyOnEveryRoute
  {{- end }}
env:
  - {name: HOME, value: /tmp}
  - {name: QDFLASH_SUMS, value: {{ .Values.bundle.sums | quote }}}
  {{- range $name, $value := .Values.serving.env }}
  - name: {{ $name }}
    value: {{ $value | quote }}
  {{- end }}
  {{- with .Values.apiKey.secretName }}
  - name: VLLM_API_KEY
    valueFrom:
      secretKeyRef: {name: {{ . | quote }}, key: {{ $.Values.apiKey.secretKey | quote }}}
  {{- end }}
ports:
  - {name: http, containerPort: {{ .Values.serving.port }}, protocol: TCP}
resources:
  {{- toYaml .Values.resources | nindent 2 }}
securityContext:
  {{- include "qdflash.securityContext" . | nindent 2 }}
# The first generation ends the start: loading, compiling and warming up are behind it.
startupProbe:
  exec: {command: {{ include "qdflash.ready" . }}}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: {{ mul .Values.startupMinutes 6 }}
readinessProbe:
  exec: {command: {{ include "qdflash.ready" . }}}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 3
# /health answers while the engine hangs; a token does not.
livenessProbe:
  exec: {command: {{ include "qdflash.ready" . }}}
  periodSeconds: 30
  timeoutSeconds: 10
  failureThreshold: 5
# Endpoints forget the pod, then it takes no more requests and finishes those it has, then it is told to stop.
lifecycle:
  preStop:
    exec:
      command:
        [python, -m, components.serving.drain, --port, {{ .Values.serving.port | quote }}, --seconds, {{ .Values.drainSeconds | quote }}]
volumeMounts:
  - {name: shm, mountPath: /dev/shm}
  - {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "qdflash.ready" -}}
[python, -m, components.serving.ready, --port, {{ .Values.serving.port | quote }}]
{{- end }}

{{- define "qdflash.securityContext" -}}
runAsNonRoot: true
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "qdflash.volumes" -}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.shm }}}
- name: tmp
  emptyDir: {}
{{- end }}

{{/* Account, placement and end of a pod, in an InferenceService's predictor as in a Deployment's template. */}}
{{- define "qdflash.pod" -}}
serviceAccountName: {{ .Release.Name }}
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ add .Values.drainSeconds 30 }}
securityContext:
  runAsNonRoot: true
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml (values .) | nindent 2 }}
{{- end }}
{{- end }}

{{/* One GPU a node: a surge pod would wait for the very GPU that it is to replace. */}}
{{- define "qdflash.strategy" -}}
type: RollingUpdate
rollingUpdate: {maxSurge: 0, maxUnavailable: 1}
{{- end }}

{{/* What a scaler changes: KServe makes the Deployment of an InferenceService under a name of its own. */}}
{{- define "qdflash.workload" -}}
{{ .Release.Name }}{{ if eq .Values.mode "kserve" }}-predictor{{ end }}
{{- end }}

{{/* Labels of the pods' own series: a Deployment's pods are NAME-HASH-RANDOM, and other releases' names may begin alike. */}}
{{- define "qdflash.series" -}}
namespace="{{ .Release.Namespace }}",pod=~"{{ include "qdflash.workload" . }}-[a-z0-9]+-[a-z0-9]{5}"
{{- end }}
