# Says in one line what pip is doing, as it does it: on a terminal (-v terminal=1) always the same line, elsewhere a new one now and then.

function say(text) {
    if (terminal) printf "\r\033[K  %s", substr(text, 1, 76)
    else if (text != last) print "  " text
    last = text
    fflush()
}

/^Collecting / { count++; if (terminal || count % 20 == 0) say("looking up packages: " count) }
/^ *Downloading .*\.(whl|tar\.gz) \(/ { split($2, part, "/"); size = $3 " " $4; if (terminal || size ~ /[0-9][0-9][0-9]+(\.[0-9]+)? MB|GB/) say("downloading " part[1] " " size) }
/^Building wheels|^  Building editable/ { say("compiling the native kernels (a minute or two)") }
/^Installing collected packages/ { say("unpacking " count " packages into the environment (a minute or two)") }
END { if (terminal) printf "\r\033[K" }
