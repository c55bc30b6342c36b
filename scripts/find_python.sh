# Sourced by the other scripts.
#   find_python VERSION...   print the first interpreter of one of these versions, in this order,
#                            from the PATH or from pyenv; fail if there is none
find_python() {
    local version candidate
    for version in "$@"; do
        for candidate in python3 "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python; do
            if [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ]; then
                echo "$candidate"
                return
            fi
        done
    done
    return 1
}
