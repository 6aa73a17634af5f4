#!/usr/bin/env bash
# Asks a gateway with curl: which models, an answer, a streamed answer, and what became of it.
#   examples/ask.sh [URL] [MODEL]
set -euo pipefail
url=${1:-http://127.0.0.1:8000} model=${2:-default}

curl -sS --fail "$url/v1/models"
echo
curl -sS --fail "$url/v1/completions" -H 'Content-Type: application/json' \
  -d "{\"model\": \"$model\", \"prompt\": \"Once upon a time\", \"max_tokens\": 8}"
echo
curl -sSN --fail "$url/v1/chat/completions" -H 'Content-Type: application/json' -H 'X-Request-Id: my-request-1' \
  -d "{\"model\": \"$model\", \"stream\": true, \"max_tokens\": 8, \"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}"
echo
curl -sS --fail "$url/omni/requests/my-request-1"
echo
