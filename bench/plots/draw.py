"""draw.py <folder> <bench.json> [<peers.json>]: what attn_bench and attn_peers left, as pictures in the folder.

time_by_n.svg    time against n of every operator that was swept, with the exponent that fits
memory_by_n.svg  workspace against n, beside the n x n scores of one head
peers.svg        share of the FMA peak by shape, attn beside its peers

The background is transparent and the colours are of middle lightness, so that a page may be light or dark.
"""
import collections
import json
import re
import statistics
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as pyplot
import numpy

INK = "#7d8590"
COLOURS = ["#3b82c4", "#d9772b", "#3a9e5c", "#c2548f", "#8f6bd1", "#b08d1e", "#2a9d9d", "#d0524a", "#6f8f2f", "#7a7f8a"]
MARKERS = ["o", "s", "^"]

pyplot.rcParams.update({
    "svg.hashsalt": "attn",  # the same figures give the same file
    "svg.fonttype": "none",
    "savefig.transparent": True,
    "font.size": 9,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False,
    "grid.color": INK, "grid.alpha": 0.25, "legend.frameon": False,
})


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


def log_log(operators, counter, label, unit):
    figure, axes = pyplot.subplots(figsize=(7, 7.5))
    for number, (operator, counters) in enumerate(operators):
        n, values = numpy.array(counters[counter]).T
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number // len(COLOURS) % len(MARKERS)]}
        axes.loglog(n, values / unit, label=label(operator, n, values), linewidth=1.3, markersize=3.5, **style)
    return figure, axes


def finish_log_log(axes, operators, label, title):
    ticks = sorted({n for _, counters in operators for n, _ in counters["seconds"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xlabel("n")
    axes.set_ylabel(label)
    axes.grid(True)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), title=title, fontsize=8)


def draw_growth(folder, operators):
    def exponent(n, values):
        return numpy.polyfit(numpy.log(n), numpy.log(values), 1)[0] if len(n) > 1 else float("nan")

    fitted = {operator: exponent(*numpy.array(counters["seconds"]).T) for operator, counters in operators.items()}
    rising = sorted(operators.items(), key=lambda item: -fitted[item[0]])
    figure, axes = log_log(rising, "seconds", lambda operator, n, values: f"{operator}  {fitted[operator]:.2f}", 1e-3)
    finish_log_log(axes, rising, "milliseconds, 2 heads of 64 channels, one thread", "operator and exponent")
    save(figure, f"{folder}/time_by_n.svg")

    figure, axes = log_log(rising, "workspace_bytes", lambda operator, n, values: operator, 1e3)
    n, matrix = numpy.array(max((counters["matrix_bytes"] for _, counters in rising), key=len)).T
    axes.loglog(n, matrix / 1e3, color=INK, linestyle="--", label="n x n scores of one head")
    finish_log_log(axes, rising, "kilobytes besides inputs and output", "operator")
    save(figure, f"{folder}/memory_by_n.svg")


def draw_peers(folder, file):
    with open(file) as text:
        rows = [row for row in json.load(text)["rows"] if not row["name"].startswith("peers/layer_norm")]
    thread_counts = sorted({row["name"].rsplit(":", 1)[1] for row in rows})
    contestants = list(dict.fromkeys(row["contestant"] for row in rows))
    figure, all_axes = pyplot.subplots(len(thread_counts), 1, figsize=(9, 3.2 * len(thread_counts)), squeeze=False)
    for axes, threads in zip(all_axes[:, 0], thread_counts):
        shares = {(row["name"], row["contestant"]): row["share"] for row in rows if row["name"].endswith(f"threads:{threads}")}
        shapes = list(dict.fromkeys(name for name, _ in shares))
        width = 0.85 / len(contestants)
        for number, contestant in enumerate(contestants):
            at = [place + (number - (len(contestants) - 1) / 2) * width for place in range(len(shapes))]
            axes.bar(at, [100 * shares.get((shape, contestant), 0) for shape in shapes], width, color=COLOURS[number % len(COLOURS)], label=contestant)
        labels = [re.sub(r"peers/softmax(_causal)?/b:(\d+)/n:(\d+)/d:(\d+)/h:(\d+)/.*", lambda m: f"n {m[3]}, d {m[4]}\n{m[5]} heads"
                         + (f", batch {m[2]}" if m[2] != "1" else "") + (", causal" if m[1] else ""), shape) for shape in shapes]
        axes.set_xticks(range(len(shapes)), labels)
        axes.set_ylabel(f"% of the FMA peak, {threads} thread{'' if threads == '1' else 's'}")
        axes.grid(True, axis="y")
        axes.set_axisbelow(True)
    all_axes[0, 0].legend(loc="lower center", bbox_to_anchor=(0.5, 1.01), ncol=3, fontsize=8)
    save(figure, f"{folder}/peers.svg")


def main(folder, bench, peers=None):
    operators = sweeps(bench)
    if operators:
        draw_growth(folder, operators)
    if peers:
        draw_peers(folder, peers)


main(*sys.argv[1:])
