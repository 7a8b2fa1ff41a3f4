"""draw.py <folder> <file...>: what attn_bench (bench.json), attn_peers (peers.json), attn_ranks_model (ranks.csv) and example_hybrid_model (hybrid_model.txt)
left, as pictures in the folder.
draw.py --sweeps: the names of the sweeps of attn_bench that it draws, between |.

time_by_n.svg    time against n of the operators in the README's table, with the exponent that fits
memory_by_n.svg  their workspace against n, beside the n x n scores of one head
peers.svg        share of the FMA peak by shape, attn beside its peers
ranks.svg        modelled speed-up against ranks
hybrid_model.svg time of a step against the tokens before it, of layers of a gated delta rule and of softmax

The background is transparent and the colours are of middle lightness, so that a page may be light or dark.
"""
import collections
import csv
import json
import os
import re
import statistics
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as pyplot
import numpy

INK = "#7d8590"
COLOURS = ["#3b82c4", "#d9772b", "#3a9e5c", "#c2548f", "#8f6bd1", "#b08d1e", "#2a9d9d", "#d0524a", "#6f8f2f", "#7a7f8a"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "<", ">", "*"]  # by which curves and peers are told apart without colours
# The cases whose growth is drawn, by the names that a reader of the README knows them by.
GROWTH = {
    "talking_heads": "talking heads",
    "softmax": "softmax",
    "sparse_strided": "Sparse Transformer",
    "softmax_local": "local window",
    "lsh": "LSH",
    "linformer": "Linformer",
    "focused_linear": "focused linear",
    "simplified_linear": "simplified linear",
    "linear": "linear",
}

pyplot.rcParams.update({
    "svg.hashsalt": "attn",  # the same figures give the same file
    "svg.fonttype": "none",
    "savefig.transparent": True,
    "font.size": 9,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False,
    "grid.color": INK, "grid.alpha": 0.25, "legend.frameon": False,
})


def styled(number):
    return {"color": COLOURS[number], "marker": MARKERS[number]}


def save(figure, file):
    figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)
    print(file)


def sweeps(file):
    """Of each operator the n and the medians of a counter at each: {operator: {counter: [(n, median)]}}."""
    seconds_of = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1}
    found = collections.defaultdict(lambda: collections.defaultdict(lambda: collections.defaultdict(list)))
    with open(file) as text:
        for row in json.load(text)["benchmarks"]:
            name = re.match(r"sweep/([^/]+)/n:(\d+)/", row["name"])
            if not name or row["run_type"] != "iteration" or "error_occurred" in row:
                continue
            of = found[name[1]]
            of["seconds"][int(name[2])].append(row["real_time"] * seconds_of[row["time_unit"]])
            for counter in ("workspace_bytes", "matrix_bytes"):
                of[counter][int(name[2])].append(row[counter])
    return {
        operator: {counter: sorted((n, statistics.median(values)) for n, values in by_n.items()) for counter, by_n in counters.items()}
        for operator, counters in found.items()
    }


def draw_log_log(file, curves, label, x_label="n"):
    """Each curve: its name, n, values and how it is drawn. Names stand at the ends: on the right apart from each other; of a curve that
    ends before, above it, where no other curve is, with a line to its end if that is far."""
    figure, axes = pyplot.subplots(figsize=(7, 5))
    for _, n, values, style in curves:
        axes.loglog(n, values, linewidth=1.3, markersize=3.5, **style)
    ticks = sorted({int(size) for _, n, _, _ in curves for size in n})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xlabel(x_label)
    axes.set_ylabel(label)
    axes.grid(True)
    axes.margins(y=0.1)

    to_points = 72 / figure.dpi
    lowest = -numpy.inf
    for name, n, values, style in sorted(curves, key=lambda curve: curve[2][-1]):
        if n[-1] == ticks[-1]:
            y = axes.transData.transform((n[-1], values[-1]))[1] * to_points
            lowest = max(y, lowest + 10)
            where = {"xytext": (7, lowest - y), "va": "center"}
        else:
            height_of = lambda x, value: axes.transData.transform((x, value))[1] * to_points
            passed = []  # how far above the end the others pass, over the width of a name
            for other, at, others, _ in curves:
                heights = [height_of(x, value) - height_of(n[-1], values[-1]) for x, value in zip(at, others) if x in n[-2:]]
                if other != name and heights:
                    passed.append((min(heights), max(heights)))
            above = 6
            while any(low - 2 < above + 10 and above < high + 4 for low, high in passed):
                above += 1
            where = {"xytext": (0, above), "va": "bottom", "ha": "right"}
            if above > 12:
                where["arrowprops"] = {"arrowstyle": "-", "color": style["color"], "linewidth": 0.8, "shrinkA": 0, "shrinkB": 3}
        axes.annotate(name, (n[-1], values[-1]), textcoords="offset points", color=style["color"], **where)
    save(figure, file)


def draw_growth(folder, operators):
    drawn = [(name, operators[case], styled(number))
             for number, (case, name) in enumerate(GROWTH.items()) if len(operators.get(case, {}).get("seconds", ())) > 1]
    if not drawn:
        return
    times, memory = [], []
    for name, counters, style in drawn:
        n, seconds = numpy.array(counters["seconds"]).T
        exponent = numpy.polyfit(numpy.log(n), numpy.log(seconds), 1)[0]
        times.append((f"{name}  {exponent:.2f}", n, 1e3 * seconds, style))
        memory.append((name, n, numpy.array(counters["workspace_bytes"])[:, 1] / 1e3, style))
    n, matrix = numpy.array(max((counters["matrix_bytes"] for _, counters, _ in drawn), key=len)).T
    memory.append(("n x n scores", n, matrix / 1e3, {"color": INK, "linestyle": "--"}))
    draw_log_log(f"{folder}/time_by_n.svg", times, "milliseconds, 2 heads of 64 channels, one thread")
    draw_log_log(f"{folder}/memory_by_n.svg", memory, "kilobytes besides inputs and output")


def draw_peers(folder, file):
    """For each shape a line, on it a mark for attn and for each peer, which are told apart by their form: of a peer's several ways the fastest."""
    with open(file) as text:
        rows = [row for row in json.load(text)["rows"] if not re.match("peers/(layer_norm|.*_backward)/", row["name"])]
    thread_counts = sorted({row["name"].rsplit(":", 1)[1] for row in rows})
    peer_of = lambda row: re.split("[:,]", row["contestant"])[0]
    peers = list(dict.fromkeys(peer_of(row) for row in rows))
    figure, all_axes = pyplot.subplots(1, len(thread_counts), figsize=(9, 3.6), squeeze=False, sharey=True)
    for axes, threads in zip(all_axes[0], thread_counts):
        fastest = collections.defaultdict(dict)
        for row in rows:
            shape, count = row["name"].rsplit("/threads:", 1)
            if count == threads:
                fastest[peer_of(row)][shape] = max(fastest[peer_of(row)].get(shape, 0), row["share"])
        shapes = list(fastest["attn"])
        for number, peer in enumerate(peers):
            shares = [(100 * fastest[peer][shape], place) for place, shape in enumerate(shapes) if shape in fastest[peer]]
            axes.plot([share for share, _ in shares], [place for _, place in shares], **styled(number), linestyle="none", markersize=7,
                      markeredgewidth=1.5, fillstyle="full" if peer == "attn" else "none", label=peer)
        labels = [re.sub(r"peers/softmax(_causal)?/b:(\d+)/n:(\d+)/d:(\d+)/h:(\d+)", lambda m: f"n {m[3]}, d {m[4]}, {m[5]} heads"
                         + (f", batch {m[2]}" if m[2] != "1" else "") + (", causal" if m[1] else ""), shape) for shape in shapes]
        axes.set_yticks(range(len(shapes)), labels)
        axes.set_ylim(len(shapes) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"% of the FMA peak of {threads} thread{'' if threads == '1' else 's'}")
        axes.grid(True)
    all_axes[0, 0].legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncol=6, fontsize=9)
    save(figure, f"{folder}/peers.svg")


def draw_ranks(folder, file):
    by_pattern = collections.defaultdict(list)
    with open(file) as text:
        for row in csv.DictReader(text):
            by_pattern[row["pattern"]].append((int(row["ranks"]), float(row["speed_up"])))
    curves = [(name, *numpy.array(points).T, styled(number)) for number, (name, points) in enumerate(by_pattern.items())]
    ranks = max((curve[1] for curve in curves), key=len)
    curves.append(("as many times as ranks", ranks, ranks, {"color": INK, "linestyle": "--"}))
    draw_log_log(f"{folder}/ranks.svg", curves, "times as fast as one rank: a model, not a measurement", "ranks")


def draw_hybrid_model(folder, file):
    with open(file) as text:
        found = re.findall(r"^ *(\d+) +([\d.]+) +([\d.]+) +delta", text.read(), re.MULTILINE)
    context, *layers = numpy.array(found, dtype=float).T
    curves = [(name, context, microseconds, styled(number))
              for number, (name, microseconds) in enumerate(zip(("gated delta rule", "softmax"), layers))]
    draw_log_log(f"{folder}/hybrid_model.svg", curves, "microseconds a layer for one token", "tokens before it")


def main(folder, *files):
    drawn_from = {
        "bench.json": lambda file: draw_growth(folder, sweeps(file)),
        "peers.json": lambda file: draw_peers(folder, file),
        "ranks.csv": lambda file: draw_ranks(folder, file),
        "hybrid_model.txt": lambda file: draw_hybrid_model(folder, file),
    }
    for file in files:
        drawn_from[os.path.basename(file)](file)


if sys.argv[1] == "--sweeps":
    print("|".join(GROWTH))
else:
    main(*sys.argv[1:])
