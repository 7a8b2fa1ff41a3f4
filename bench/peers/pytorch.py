"""PyTorch on the CPU: the other side of peer.hpp."""
import math
import sys
import time

import numpy
import torch
import torch.nn.functional as functional


def make_ways(kind, batch, heads, n, d, threads, folder):
    torch.set_num_threads(threads)

    def read(number, *shape):
        return torch.from_numpy(numpy.fromfile(f"{folder}/{number}", dtype=numpy.float32).reshape(shape))

    if kind == "layer_norm":
        x, weight, bias = read(0, n, d), read(1, d), read(2, d)
        return [("layer_norm", lambda: functional.layer_norm(x, (d,), weight, bias, 1e-5))]

    q, k, v = (read(number, batch, heads, n, d) for number in range(3))
    causal = kind.startswith("softmax_causal")
    hidden = torch.full((n, n), -math.inf).triu(1) if causal else None

    def formula():
        scores = torch.matmul(q * (1 / math.sqrt(d)), k.transpose(-2, -1))
        if causal:
            scores += hidden
        return torch.matmul(torch.softmax(scores, -1), v)

    if kind.endswith("_backward"):
        with torch.inference_mode(False):
            return gradient_ways(q.clone(), k.clone(), v.clone(), read(3, batch, heads, n, d).clone(), hidden)

    # Debian's build multiplies batches of matrices by loops of its own, but single matrices by the installed BLAS.
    def by_head():
        out = torch.empty_like(v)
        for of_q, of_k, of_v, of_out in zip(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), out.flatten(0, 1)):
            scores = torch.mm(of_q * (1 / math.sqrt(d)), of_k.t())
            if causal:
                scores += hidden
            torch.mm(torch.softmax(scores, -1), of_v, out=of_out)
        return out

    ways = [("matmul, softmax, matmul", formula), ("mm, softmax, mm for each head", by_head)]
    if hasattr(functional, "scaled_dot_product_attention"):  # from 2.0 on
        ways.append(("scaled_dot_product_attention", lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=causal)))
    return ways


def gradient_ways(q, k, v, given, hidden):
    """The way back alone: what the way there keeps for it has been computed. Each gives the gradients of q, k and v, or of their heads."""
    d = q.shape[-1]

    def way_back(outs, leaves, of_outs):
        def call():
            with torch.inference_mode(False):
                return torch.autograd.grad(outs, leaves, of_outs, retain_graph=True)
        return call

    def formula(q, k, v):
        scores = torch.matmul(q * (1 / math.sqrt(d)), k.transpose(-2, -1))
        if hidden is not None:
            scores = scores + hidden
        return torch.matmul(torch.softmax(scores, -1), v)

    with torch.enable_grad():
        hidden = hidden if hidden is None else hidden.clone()
        whole = [x.requires_grad_() for x in (q, k, v)]
        heads = [[x.detach().clone().requires_grad_() for x in t.flatten(0, 1)] for t in whole]
        outs = [formula(*head) for head in zip(*heads)]
        ways = [("autograd of matmul, softmax, matmul", way_back([formula(*whole)], whole, [given])),
                ("the same for each head", way_back(outs, sum(heads, []), list(given.flatten(0, 1))))]
        if hasattr(functional, "scaled_dot_product_attention"):  # from 2.0 on
            out = functional.scaled_dot_product_attention(*whole, is_causal=hidden is not None)
            ways.append(("autograd of scaled_dot_product_attention", way_back([out], whole, [given])))
    return ways


def seconds_per_call(call, at_least):
    began = time.perf_counter()
    call()
    first = time.perf_counter() - began
    if first >= at_least:
        return first
    began, calls = time.perf_counter(), 0  # the first call found cold caches
    while calls == 0 or time.perf_counter() - began < at_least:
        call()
        calls += 1
    return (time.perf_counter() - began) / calls


def answer(words, ways):
    if words[0] == "problem":
        ways[:] = make_ways(words[1], *map(int, words[2:7]), words[7])
        return "ways " + "|".join(name for name, _ in ways)
    _, call = ways[int(words[1])]
    if words[0] == "run":
        result = call()
        if not torch.is_tensor(result):
            result = torch.cat([x.flatten() for x in result])
        result.contiguous().numpy().tofile(words[2])
        return "done"
    return f"seconds {seconds_per_call(call, float(words[2]))}"


ways = []
print(f"ready PyTorch|{torch.__version__}", flush=True)
with torch.inference_mode():
    for line in sys.stdin:
        try:
            print(answer(line.split(), ways), flush=True)
        except Exception as error:  # the other side says what was asked, and goes on
            print("failed", " ".join(str(error).split()), flush=True)
