# Written by python -m llmctl.generate; install as /usr/share/bash-completion/completions/llmctl
_llmctl_values() {
  case "$1" in
    process) echo supervisor control frontend detokenizer scheduler supervisor-0 control-0 frontend-0 detokenizer-0 scheduler-0 ;;
    rid) llmctl requests -o json 2>/dev/null | sed -n 's/.*"request": "\([^"]*\)".*/\1/p' | sort -u ;;
    client) llmctl requests -o json 2>/dev/null | sed -n 's/.*"client_id": "\([^" ]*\)".*/\1/p' | sort -u ;;
    operation) llmctl audit -o json 2>/dev/null | sed -n 's/.*"operation_id": "\([^"]*\)".*/\1/p' | sort -u ;;
    crash) llmctl crashes -o json 2>/dev/null | sed -n 's/.*"id": "\([^"]*\)".*/\1/p' ;;
    key) llmctl config keys 2>/dev/null ;;
  esac
}
_llmctl() {
  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" verb='' options='' skip='' place=0 word
  COMPREPLY=()
  if [ "$current" = '=' ]; then current=''; elif [ "$previous" = '=' ]; then previous="${COMP_WORDS[COMP_CWORD-2]}"; fi
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    if [ "$word" = '=' ]; then skip=1; continue; fi
    if [ -n "$skip" ]; then skip=''; continue; fi
    case "$word" in
      --socket | -i | --instance | --url | --key-file | -o | --output | --timeout | --reason | --for | --operation | --sort | --phase | --client-id | -n | --lines | --since | --kind | --dir | --verb | -c | --config | --output-file | --model | --api-key-file | --work | --streams | --requests | --input-len | --output-len | --seed | --mode | --version) skip=1 ;;
      -*) ;;
      *) if [ -z "$verb" ]; then verb="$word"; else place=$((place + 1)); fi ;;
    esac
  done
  case "$verb:$previous" in
    *:--socket) COMPREPLY=($(compgen -f -- "$current")) ;;
    *:-i | *:--instance) : ;;
    *:--url) : ;;
    *:--key-file) COMPREPLY=($(compgen -f -- "$current")) ;;
    *:-o | *:--output) COMPREPLY=($(compgen -W 'table wide json yaml' -- "$current")) ;;
    *:--timeout) : ;;
    *:--reason) : ;;
    wait:--for) COMPREPLY=($(compgen -W 'ready drained stopped version=' -- "$current")) ;;
    wait:--operation) COMPREPLY=($(compgen -W "$(_llmctl_values operation)" -- "$current")) ;;
    requests:--sort) COMPREPLY=($(compgen -W 'age tokens rate pages prompt' -- "$current")) ;;
    requests:--phase) COMPREPLY=($(compgen -W 'submitted waiting prefill decode held' -- "$current")) ;;
    requests:--client-id) COMPREPLY=($(compgen -W "$(_llmctl_values client)" -- "$current")) ;;
    requests:-n | requests:--lines) : ;;
    events:--since) : ;;
    events:--kind) COMPREPLY=($(compgen -W 'state process operation config degraded' -- "$current")) ;;
    events:-n | events:--lines) : ;;
    logs:-n | logs:--lines) : ;;
    logs:--dir) COMPREPLY=($(compgen -f -- "$current")) ;;
    audit:-n | audit:--lines) : ;;
    audit:--verb) COMPREPLY=($(compgen -W 'flush reload config/reload drain resume abort restart stop log-level lora/load lora/unload' -- "$current")) ;;
    crashes:-n | crashes:--lines) : ;;
    doctor:-c | doctor:--config) COMPREPLY=($(compgen -f -- "$current")) ;;
    report:--output-file) COMPREPLY=($(compgen -f -- "$current")) ;;
    bench:--model) : ;;
    bench:--api-key-file) COMPREPLY=($(compgen -f -- "$current")) ;;
    bench:--work) COMPREPLY=($(compgen -W 'short shared long' -- "$current")) ;;
    bench:--streams) : ;;
    bench:--requests) : ;;
    bench:--input-len) : ;;
    bench:--output-len) : ;;
    bench:--seed) : ;;
    reload:--mode) COMPREPLY=($(compgen -W 'drain abort now' -- "$current")) ;;
    reload:--version) : ;;
    abort:--client-id) COMPREPLY=($(compgen -W "$(_llmctl_values client)" -- "$current")) ;;
  esac
  if [ -n "$skip" ]; then _llmctl_nospace; return; fi
  case "$verb" in
    '') COMPREPLY=($(compgen -W 'status health wait ps requests kv weights config events logs audit crashes top doctor report version bench flush reload drain resume abort lora restart stop log-level' -- "$current")) ;;
    status) options='-w --watch' ;;
    health) options='' ;;
    wait) options='--for --operation' ;;
    ps) options='-w --watch' ;;
    requests) options='-w --watch --sort --phase --client-id -n --lines' ;;
    kv) options='-w --watch' ;;
    weights) options='' ;;
    config) options='--origin --all' ;;
    events) options='-f --follow --since --kind -n --lines' ;;
    logs) options='-n --lines -f --follow --dir' ;;
    audit) options='-n --lines --verb' ;;
    crashes) options='-n --lines' ;;
    top) options='--once' ;;
    doctor) options='-c --config' ;;
    report) options='--output-file' ;;
    version) options='' ;;
    bench) options='--model --api-key-file --work --streams --requests --input-len --output-len --seed' ;;
    flush) options='' ;;
    reload) options='--mode --version --no-wait' ;;
    drain) options='' ;;
    resume) options='' ;;
    abort) options='--client-id --all' ;;
    lora) options='' ;;
    restart) options='--no-wait --all' ;;
    stop) options='--no-wait' ;;
    log-level) options='' ;;
  esac
  case "$current" in
    -*) COMPREPLY=($(compgen -W "$options --socket --instance --url --key-file --output --timeout --wait --dry-run --yes --reason --no-color" -- "$current")); return ;;
  esac
  case "$verb:$place" in
    config:0) COMPREPLY=($(compgen -W 'show diff explain keys schema reload' -- "$current")) ;;
    config:1) COMPREPLY=($(compgen -W "$(_llmctl_values key)" -- "$current")) ;;
    logs:*) COMPREPLY=($(compgen -W "$(_llmctl_values process)" -- "$current")) ;;
    crashes:0) COMPREPLY=($(compgen -W "$(_llmctl_values crash)" -- "$current")) ;;
    bench:0) : ;;
    reload:0) COMPREPLY=($(compgen -W 'config weights' -- "$current")) ;;
    reload:1) COMPREPLY=($(compgen -f -- "$current")) ;;
    abort:0) COMPREPLY=($(compgen -W "$(_llmctl_values rid)" -- "$current")) ;;
    lora:0) COMPREPLY=($(compgen -W 'list load unload' -- "$current")) ;;
    lora:1) : ;;
    lora:2) COMPREPLY=($(compgen -f -- "$current")) ;;
    log-level:0) COMPREPLY=($(compgen -W 'debug info warning error default' -- "$current")) ;;
    log-level:1) COMPREPLY=($(compgen -W "$(_llmctl_values process)" -- "$current")) ;;
  esac
}
_llmctl_nospace() {
  if [ "${#COMPREPLY[@]}" = 1 ] && [ "${COMPREPLY[0]%=}" != "${COMPREPLY[0]}" ]; then compopt -o nospace 2>/dev/null; fi
}
complete -F _llmctl llmctl
