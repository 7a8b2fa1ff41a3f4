# objdump -d --no-show-raw-insn tiles.o | awk -f check.awk: whether the innermost loop of each tile keeps its sums and operands in registers.
function end_of_function(    i, j, from, best, text, spills) {
    if (!is_tile) return
    for (i = 1; i <= count; ++i) {
        if (target[i] == "" || !(target[i] in number) || number[target[i]] > i) continue # no jump back
        from = number[target[i]]
        text = ""
        for (j = from; j <= i; ++j) text = text code[j] "\n"
        if (text ~ /fmadd|fmla|mulp/ && (best == "" || length(text) < length(best))) best = text
    }
    if (best == "") { print name ": no loop of multiply-adds"; bad = 1; return }
    ++tiles
    spills = split(best, lines, "\n")
    for (i = 1; i <= spills; ++i)
        if (lines[i] ~ /[xyz]mm[0-9].*\(%r[sb]p|\(%r[sb]p.*[xyz]mm[0-9]|[qv][0-9]+.*\[(sp|x29)/) {
            print name ": a register goes to memory and back:" lines[i]
            bad = 1
        }
}
/^[0-9a-f]+ <.*>:$/ {
    end_of_function()
    name = $2
    gsub(/[<>:]/, "", name)
    is_tile = name ~ /multiply_tileI/
    count = 0
    split("", number)
    next
}
is_tile && /^ *[0-9a-f]+:/ {
    address = $1
    sub(/:/, "", address)
    ++count
    number[address] = count
    code[count] = $0
    target[count] = ""
    if ($2 ~ /^(j|b)/ || $2 ~ /^cb/) for (f = 3; f <= NF; ++f) if ($f ~ /^[0-9a-f]+$/ && $(f + 1) ~ /^</) target[count] = $f
}
END {
    end_of_function()
    print tiles + 0 " tiles"
    exit bad || !tiles
}
