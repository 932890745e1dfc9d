# Written by python -m llmctl.generate; install as /usr/share/bash-completion/completions/llmctl
_llmctl() {
  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" verb='' words='' word
  COMPREPLY=()
  case "$previous" in
    -o | --output) COMPREPLY=($(compgen -W 'table wide json yaml' -- "$current")); return ;;
    --sort) COMPREPLY=($(compgen -W 'age tokens rate pages prompt' -- "$current")); return ;;
    --phase) COMPREPLY=($(compgen -W 'submitted waiting prefill decode held' -- "$current")); return ;;
    --kind) COMPREPLY=($(compgen -W 'state process operation config degraded' -- "$current")); return ;;
    --work) COMPREPLY=($(compgen -W 'short shared long' -- "$current")); return ;;
    --mode) COMPREPLY=($(compgen -W 'drain abort now' -- "$current")); return ;;
    --socket | --key-file | --dir | -c | --config | --output-file | --api-key-file) COMPREPLY=($(compgen -f -- "$current")); return ;;
  esac
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case "$word" in status | health | wait | ps | requests | kv | weights | config | events | logs | audit | crashes | top | doctor | report | version | bench | flush | reload | drain | resume | abort | lora | restart | stop | log-level) verb="$word"; break ;; esac
  done
  case "$verb" in
    '') words='status health wait ps requests kv weights config events logs audit crashes top doctor report version bench flush reload drain resume abort lora restart stop log-level' ;;
    status) words='-w --watch' ;;
    health) words='' ;;
    wait) words='--for --operation' ;;
    ps) words='-w --watch' ;;
    requests) words='-w --watch --sort --phase --client-id -n --lines' ;;
    kv) words='-w --watch' ;;
    weights) words='' ;;
    config) words='show diff explain schema reload --origin --all' ;;
    events) words='-f --follow --since --kind -n --lines' ;;
    logs) words='-n --lines -f --follow --dir' ;;
    audit) words='-n --lines --verb' ;;
    crashes) words='-n --lines' ;;
    top) words='--once' ;;
    doctor) words='-c --config' ;;
    report) words='--output-file' ;;
    version) words='' ;;
    bench) words='--model --api-key-file --work --streams --requests --input-len --output-len --seed' ;;
    flush) words='' ;;
    reload) words='config weights --mode --version --no-wait' ;;
    drain) words='' ;;
    resume) words='' ;;
    abort) words='--client-id --all' ;;
    lora) words='list load unload' ;;
    restart) words='--no-wait --all' ;;
    stop) words='--no-wait' ;;
    log-level) words='debug info warning error default' ;;
  esac
  case "$verb:$current" in
    abort:[!-]*|abort:) words="$words $(llmctl requests -o json 2>/dev/null | sed -n 's/.*"request": "\([^"]*\)".*/\1/p')" ;;
    reload:*/*) COMPREPLY=($(compgen -f -- "$current")); return ;;
  esac
  COMPREPLY=($(compgen -W "$words --socket --instance --url --key-file --output --timeout --wait --dry-run --yes --reason --no-color" -- "$current"))
}
complete -F _llmctl llmctl
