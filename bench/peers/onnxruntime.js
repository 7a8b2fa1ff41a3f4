// ONNX Runtime on the CPU: the other side of peer.hpp. Its module is looked for where cmake/run peers installs it (NODE_PATH).
"use strict";
const fs = require("fs");
const ort = require("onnxruntime-node");

// --- A model of one node, in the few fields of ONNX's protocol buffers that it takes -------------------------------------------------

function varint(value) {
    const bytes = [];
    for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
    return Buffer.from([...bytes, value]);
}
const number = (field, value) => Buffer.concat([varint(field * 8), varint(value)]);
const text = (field, value) => message(field, Buffer.from(value));
function message(field, ...parts) {
    const body = Buffer.concat(parts);
    return Buffer.concat([varint(field * 8 + 2), varint(body.length), body]);
}
function real(field, value) {
    const bytes = Buffer.alloc(4);
    bytes.writeFloatLE(value);
    return Buffer.concat([varint(field * 8 + 5), bytes]);
}

const elements = { float32: 1, int32: 6 };
function value(field, name, type, shape) {
    const dimensions = message(2, ...shape.map((size) => message(1, number(1, size))));
    return message(field, text(1, name), message(2, message(1, number(1, elements[type]), dimensions)));
}

/// inputs: {name: ort.Tensor, or null for one that is left out}, in the operator's order; outputs: names, the first being the answer.
function model(domain, operator, inputs, outputs, outputShape, integers, reals) {
    const given = Object.keys(inputs).filter((name) => inputs[name]);
    const node = message(
        1,
        ...Object.keys(inputs).map((name) => text(1, inputs[name] ? name : "")),
        ...outputs.map((name) => text(2, name)),
        text(4, operator),
        ...Object.entries(integers).map(([name, i]) => message(5, text(1, name), number(3, i), number(20, 2))),
        ...Object.entries(reals).map(([name, f]) => message(5, text(1, name), real(2, f), number(20, 1))),
        text(7, domain),
    );
    const graph = message(
        7,
        node,
        text(2, operator),
        ...given.map((name) => value(11, name, inputs[name].type, inputs[name].dims)),
        value(12, outputs[0], "float32", outputShape),
    );
    const operators = [["", 23], ["com.microsoft", 1]].map(([name, version]) => message(8, text(1, name), number(2, version)));
    return Buffer.concat([number(1, 10), graph, ...operators]);
}

// --- The ways ------------------------------------------------------------------------------------------------------------------------

function read(folder, file) {
    const bytes = fs.readFileSync(`${folder}/${file}`);
    return new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
}

/// [batch][first][second][d] as [batch][second][first][d]: heads before tokens, or tokens before heads.
function exchanged(from, batch, first, second, d) {
    const to = new Float32Array(from.length);
    for (let b = 0; b < batch; ++b)
        for (let i = 0; i < first; ++i)
            for (let j = 0; j < second; ++j) {
                const at = ((b * first + i) * second + j) * d;
                to.set(from.subarray(at, at + d), ((b * second + j) * first + i) * d);
            }
    return to;
}

async function way(name, threads, domain, operator, inputs, outputs, outputShape, integers, reals, arranged) {
    const options = { intraOpNumThreads: threads, interOpNumThreads: 1 };
    const session = await ort.InferenceSession.create(model(domain, operator, inputs, outputs, outputShape, integers, reals), options);
    const feeds = Object.fromEntries(Object.entries(inputs).filter(([, tensor]) => tensor));
    return {
        name,
        call: async () => (await session.run(feeds))[outputs[0]].data,
        arranged, // the answer in the order of the first input
    };
}

async function makeWays(kind, batch, heads, n, d, threads, folder) {
    if (kind.endsWith("_backward")) return [];
    const tensor = (type, data, shape) => new ort.Tensor(type, data, shape);
    if (kind === "layer_norm") {
        const inputs = { x: tensor("float32", read(folder, 0), [n, d]), weight: tensor("float32", read(folder, 1), [d]), bias: tensor("float32", read(folder, 2), [d]) };
        return [await way("LayerNormalization", threads, "", "LayerNormalization", inputs, ["y"], [n, d], { axis: 1 }, { epsilon: 1e-5 }, (y) => y)];
    }

    const causal = kind === "softmax_causal" ? 1 : 0;
    const byHead = [0, 1, 2].map((file) => read(folder, file));
    const headMajor = (i) => tensor("float32", byHead[i], [batch, heads, n, d]);
    const tokenMajor = (i) => tensor("float32", exchanged(byHead[i], batch, heads, n, d), [batch, n, heads * d]);
    const inHeads = (y) => exchanged(y, batch, n, heads, d);
    const wide = [batch, n, heads * d];
    const attempts = [
        () => way("MultiHeadAttention", threads, "com.microsoft", "MultiHeadAttention", { q: tokenMajor(0), k: tokenMajor(1), v: tokenMajor(2) }, ["y"], wide, { num_heads: heads, unidirectional: causal }, {}, inHeads),
        () => way("Attention", threads, "", "Attention", { q: headMajor(0), k: headMajor(1), v: headMajor(2) }, ["y"], [batch, heads, n, d], { is_causal: causal }, {}, (y) => y),
    ];
    if (causal) {
        const lengths = tensor("int32", new Int32Array(batch).fill(n - 1), [batch]), total = tensor("int32", Int32Array.of(n), [1]);
        attempts.push(() => way("GroupQueryAttention", threads, "com.microsoft", "GroupQueryAttention", { q: tokenMajor(0), k: tokenMajor(1), v: tokenMajor(2), past_key: null, past_value: null, lengths, total }, ["y", "present_key", "present_value"], wide, { num_heads: heads, kv_num_heads: heads }, {}, inHeads));
    }
    const ways = [];
    for (const attempt of attempts) {
        try {
            ways.push(await attempt());
        } catch (error) {
            console.error(`ONNX Runtime: ${error.message}`); // a version without this operator
        }
    }
    return ways;
}

// --- The conversation ----------------------------------------------------------------------------------------------------------------

async function secondsPerCall(call, atLeast) {
    const since = (began) => Number(process.hrtime.bigint() - began) * 1e-9;
    let began = process.hrtime.bigint();
    await call();
    const first = since(began);
    if (first >= atLeast) return first;
    began = process.hrtime.bigint(); // the first call found cold caches
    let calls = 0;
    for (; calls === 0 || since(began) < atLeast; ++calls) await call();
    return since(began) / calls;
}

async function main() {
    let ways = [];
    console.log(`ready ONNX Runtime|${require("onnxruntime-node/package.json").version}`);
    for await (const line of require("readline").createInterface({ input: process.stdin })) {
        const words = line.split(" ");
        try {
            if (words[0] === "problem") {
                ways = await makeWays(words[1], ...words.slice(2, 7).map(Number), words[7]);
                console.log(`ways ${ways.map((w) => w.name).join("|")}`);
            } else if (words[0] === "run") {
                const chosen = ways[Number(words[1])];
                const answer = chosen.arranged(await chosen.call());
                fs.writeFileSync(words[2], Buffer.from(answer.buffer, answer.byteOffset, answer.byteLength));
                console.log("done");
            } else {
                console.log(`seconds ${await secondsPerCall(ways[Number(words[1])].call, Number(words[2]))}`);
            }
        } catch (error) {
            console.log(`failed ${error.message.replace(/\s+/g, " ")}`);
        }
    }
}
main();
