# cmake/docs_formulas.awk: a header with the formulas of its comments, or a README with its own, as MathML, for cmake/docs_filter.
# Formulas are indented lines of /// comments, or of a README, written to be read in an editor. Indented lines one after the other are a block: of formulas if
# the first has a relation (=, += or <=) and none looks like code, a list, or a table of words. One line with the block in @htmlonly then stands
# for it, as a paragraph, so that no formula gets into a brief description. A line of it without a relation or a wide space continues the one
# before. Other blocks, and one that begins a comment, stay as they are.
# Formulas are read token by token, without a grammar: `x_j`, `x_(j + 1)`, `x_i,h` and `x[i, j]` have subscripts, `x^2` and `x^(a - b)` a
# superscript; of a name such as d_out or log_sum_exp the underscores are its own. `sum_j` and `sum over j of` are a sum with what it runs over.
# Three or more spaces part formulas of one line, between which a narrow page may break it. English words are known by a list of frequent ones,
# and a word after one of them is one too.
BEGIN {
    count = split("alpha beta gamma delta eps eta theta lambda mu pi sigma phi infinity", names, " ")
    split("3b1 3b2 3b3 3b4 3b5 3b7 3b8 3bb 3bc 3c0 3c3 3c6 221e", codes, " ")
    for (i = 1; i <= count; ++i) greek[names[i]] = "&#x" codes[i] ";"
    count = split("the of for that to in is or and where over with without if not by as after before comes how many are an other another " \
                  "any when otherwise at on does than it its whose which all each only seen some summed both", names, " ")
    for (i = 1; i <= count; ++i) frequent[names[i]] = 1
    count = split("cos sin exp log tanh erf", names, " ")
    for (i = 1; i <= count; ++i) is_function[names[i]] = 1
    split("- * . < > <= >= .. ...", names, " ")
    split("2212 b7 b7 3c 3e 2264 2265 2026 2026", codes, " ")
    for (i in names) sign[names[i]] = "&#x" codes[i] ";"
    sign["&"] = "&amp;"
}
# Takes what matches from the beginning of `rest`, into `token`.
function take(pattern) {
    if (!match(rest, "^(" pattern ")")) return 0
    token = substr(rest, 1, RLENGTH)
    rest = substr(rest, RLENGTH + 1)
    return 1
}
# The text inside of the brackets with which `rest` begins, which it takes; `matched` says whether they close.
function take_inside(    i, depth, letter, text) {
    for (i = 1; i <= length(rest); ++i) {
        letter = substr(rest, i, 1)
        depth += (letter ~ /[[(]/) - (letter ~ /[])]/)
        if (depth == 0) break
    }
    matched = depth == 0
    if (!matched) return ""
    text = substr(rest, 2, i - 2)
    opening = substr(rest, 1, 1)
    closing = letter
    rest = substr(rest, i + 1)
    return text
}
function fence(sign, form) { return "<mo form=\"" form "fix\" stretchy=\"false\">" sign "</mo>" }
function space(width) { return "<mspace width=\"" width "em\"/>" }
function read(text, before,    kept, out) {
    kept = rest
    rest = text
    out = read_row(before)
    rest = kept
    return "<mrow>" out "</mrow>"
}
# A group in brackets, with them.
function read_group(    text, out, end) {
    text = take_inside()
    if (!matched) { take("."); return "<mo stretchy=\"false\">" token "</mo>" }
    out = fence(opening, "pre")
    end = fence(closing, "post")
    return "<mrow>" out read(text) end "</mrow>"
}
function read_name(name) {
    if (name in greek) return "<mi>" greek[name] "</mi>"
    return "<mi>" name "</mi>"
}
# What is raised by ^: what is in parentheses, a number, or a name with the arguments of a function.
function read_raised(    out) {
    if (rest ~ /^\(/) { out = take_inside(); return read(out) }
    if (take("-?[0-9]+")) return token ~ /^-/ ? "<mo form=\"prefix\">&#x2212;</mo><mn>" substr(token, 2) "</mn>" : "<mn>" token "</mn>"
    if (!take("[A-Za-z]+")) return ""
    out = read_name(token)
    return rest ~ /^\(/ ? out read_group() : out
}
# Indices, a letter each, or a number.
function letters(text) {
    gsub(/[A-Za-z]/, "<mi>&</mi>", text)
    gsub(/^[0-9]+$/, "<mn>&</mn>", text)
    return text
}
# `base` with the subscripts, superscripts and primes that follow it.
function with_scripts(base,    below, above, text) {
    for (;;) {
        if (take("'")) base = base "<mo lspace=\"0em\" rspace=\"0em\">&#x2032;</mo>"
        else if (rest ~ /^\^[-(A-Za-z0-9]/) { take("\\^"); above = above read_raised() }
        else if (rest ~ /^(\[|_\()/) {
            take("_")
            text = take_inside()
            if (!matched) break
            below = below (below == "" ? "" : "<mo>,</mo>") read(text)
        } else if (take("_[a-z],[a-z]")) below = below read(substr(token, 2))
        else if (take("_[A-Za-z0-9]+")) below = below letters(substr(token, 2))
        else break
    }
    if (base ~ /2032/) base = "<mrow>" base "</mrow>"
    if (below != "" && above != "") return "<msubsup>" base "<mrow>" below "</mrow><mrow>" above "</mrow></msubsup>"
    if (below != "") return "<msub>" base "<mrow>" below "</mrow></msub>"
    return above == "" ? base : "<msup>" base "<mrow>" above "</mrow></msup>"
}
function read_sum(    under) {
    if (take("_[a-z]+")) under = "<mrow>" letters(substr(token, 2)) "</mrow>"
    else if (match(rest, /^ over .* of /)) {
        under = substr(rest, 7)
        rest = substr(under, index(under, " of ") + 3)
        under = substr(under, 1, index(under, " of ") - 1)
        sub(/,$/, "", under)
        under = read(under, "word")
    } else take(" of")
    return under == "" ? "<mo>&#x2211;</mo>" : "<munder><mo movablelimits=\"false\">&#x2211;</mo>" under "</munder>"
}
# Whether a name is an English word, as `a` is before a name that is neither a function nor a frequent word.
function is_word(name, last,    following) {
    if (name in frequent) return 1
    if (last == "word" && name ~ /^[a-z][a-z]+$/ && !(name in greek) && !(name in is_function)) return 1
    if (name != "a" || !match(rest, /^ [a-z_]+[a-z]([ ,]|$)/)) return 0
    following = substr(rest, 2, RLENGTH - 1)
    sub(/[ ,]$/, "", following)
    return !(following in is_function) && !(following in frequent)
}
# All of `rest`. `last` is what comes before: nothing (or an operator, after which a minus is a sign), a letter, a name or a word.
function read_row(last,    out, kind, gap, item, name, text) {
    while (rest != "") {
        gap = take(" +") ? length(token) : 0
        kind = "letter"
        if (rest ~ /^[[(]/) item = with_scripts(read_group())
        else if (rest ~ /^\|[^|]+\|/) {
            take("\\|[^|]+\\|")
            text = substr(token, 2, length(token) - 2)
            item = with_scripts("<mrow>" fence("|", "pre") read(text) fence("|", "post") "</mrow>")
        } else if (take("[0-9]+(\\.[0-9]+)?(e-?[0-9]+)?")) {
            text = token
            item = ""
            if (match(text, /e.*/)) {
                name = substr(text, RSTART + 1)
                text = substr(text, 1, RSTART - 1)
                item = "<msup><mn>10</mn><mn>" name "</mn></msup>"
                sub(/-/, "\\&#x2212;", item)
            }
            item = with_scripts(item == "" ? "<mn>" text "</mn>" : text == "1" ? item : "<mrow><mn>" text "</mn><mo>&#xd7;</mo>" item "</mrow>")
        } else if (take("`[^`]*`|[a-z]+:( |$)|[a-z][a-z]+-[a-z][a-z]+|[a-z]+'s ")) {
            name = token
            gsub(/`/, "", name)
            if (sub(/ $/, "", name)) rest = " " rest
            item = "<mtext>" name "</mtext>"
            kind = name ~ /:$/ ? "name" : "word"
        } else if (take("[A-Za-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*")) {
            name = token
            if (match(name, /_([A-Za-z0-9]|[ijpr][ijpr])$/)) {
                rest = substr(name, RSTART) rest
                name = substr(name, 1, RSTART - 1)
            }
            if (rest !~ /^[[(_^'.]/ && is_word(name, last)) {
                item = "<mtext>" name "</mtext>"
                kind = "word"
            } else if (name == "sum" && rest !~ /^(,|$)/) { item = read_sum(); kind = "" }
            else if (name == "sqrt" && rest ~ /^\(.*\)/) { text = take_inside(); item = with_scripts("<msqrt>" read(text) "</msqrt>") }
            else if (name ~ /^d[A-Za-z]$/) item = "<mi>d</mi>" with_scripts(read_name(substr(name, 2)))
            else {
                if (length(name) > 1 && !(name in greek)) kind = "name"
                item = with_scripts(read_name(name))
            }
        } else {
            take("\\.\\.\\.?|[-+*<>=!]=|[^ -~]+|.")
            item = token in sign ? sign[token] : token
            kind = token ~ /^([.]|[.][.]+|:)$/ ? "letter" : ""
            if (token == "." && gap && rest ~ /^ /) kind = ""
            else if (token == ".") item = "."
            if (kind == "letter") item = (token ~ /^\.\./ ? "<mi>" : "<mi mathvariant=\"normal\">") item "</mi>"
            else if (token ~ /^[-+]$/ && (last == "" || (gap && rest !~ /^ /)))
                item = "<mo form=\"prefix\"" (rest ~ /^ / ? " rspace=\"0.22em\"" : "") ">" item "</mo>"
            else if (token == "/") item = "<mo lspace=\"" (gap ? 0.2 : 0) "em\" rspace=\"" (gap ? 0.2 : 0) "em\">/</mo>"
            else if (token == "," || token == ";") item = "<mo separator=\"true\">" item "</mo>"
            else item = "<mo>" item "</mo>"
        }
        if (kind == "word" && last == "word" && gap == 1) { sub(/<\/mtext>$/, "", out); out = out " " name "</mtext>"; continue }
        if (gap > 1) out = out space(1)
        else if (gap && (last != "" || (kind == "word" && out ~ /[,;]<\/mo>$/)) && (kind != "" || item ~ /2211|"prefix"/))
            out = out space(last kind ~ /name|word/ ? 0.28 : 0.17)
        out = out item
        last = kind
    }
    return out
}
# The lines of a block as MathML, or nothing if they are no formulas.
function formulas(    i, count, parts, text, out) {
    if (lines[1] !~ / (=|\+=|<=) /) return ""
    for (i = 1; i <= block; ++i)
        if (lines[i] ~ /[{}"]|;$|\/\/|::|^[0-9]+\. |^[A-Za-z0-9 ]*[A-Za-z0-9]   +[^ =+]/) return ""
    for (i = block; i > 1; --i)
        if (lines[i] !~ / (=|\+=|<=) |   /) { lines[i - 1] = lines[i - 1] " " lines[i]; lines[i] = "" }
    for (i = 1; i <= block; ++i) {
        if (lines[i] == "") continue
        text = lines[i]
        gsub(/ +=/, " =", text)
        gsub(/ +\+=/, " +=", text)
        gsub(/   +/, "\n", text)
        count = split(text, parts, "\n")
        out = out "<div>"
        for (part = 1; part <= count; ++part) out = out (part > 1 ? " " : "") "<math displaystyle=\"true\">" read(parts[part]) "</math>"
        out = out "</div>"
    }
    return "<div class=\"formula\">" out "</div>"
}
function flush(    i, out) {
    out = begins ? "" : formulas()
    if (out != "") print margin "\n" margin " @htmlonly[block]" out "@endhtmlonly\n" margin
    else for (i = 1; i <= block; ++i) print given[i]
    block = 0
}
/^```/ { fenced = !fenced }
FILENAME ~ /\.md$/ ? /^    / && !fenced : /^ *\/\/\/     / {
    if (!block) {
        begins = !commented
        margin = match($0, /^ *\/\/\//) ? substr($0, 1, RLENGTH) : ""
    }
    given[++block] = $0
    sub(/^ *(\/\/\/)? +/, "")
    lines[block] = $0
    next
}
{ if (block) flush(); commented = /^ *\/\/\// || FILENAME ~ /\.md$/; print }
END { if (block) flush() }
