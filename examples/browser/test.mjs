// node test.mjs attention.wasm: calls what index.html calls, and holds the weights to their definition.
import { readFile } from 'node:fs/promises';
import { argv } from 'node:process';

const system = new Proxy({}, { get: () => () => 52 });
const { instance } = await WebAssembly.instantiate(await readFile(argv[2]), { wasi_snapshot_preview1: system });
const wasm = instance.exports;
wasm._initialize();

let failures = 0;
function check(right, what) {
  if (!right) ++failures, console.log(`wrong: ${what}`);
}

function attend(text, pattern, sharpness) {
  const room = new Uint8Array(wasm.memory.buffer, wasm.text(), wasm.text_size());
  const count = wasm.attend(new TextEncoder().encodeInto(text, room).written, pattern, sharpness);
  const places = new Int32Array(wasm.memory.buffer, wasm.words(), 2 * count);
  const word = i => new TextDecoder().decode(new Uint8Array(wasm.memory.buffer, wasm.text() + places[2 * i], places[2 * i + 1] - places[2 * i]));
  return { words: Array.from({ length: count }, (_, i) => word(i)), weights: new Float32Array(wasm.memory.buffer, wasm.weights(), count * count).slice() };
}

/** The cosine of the angle between the counts of their letters. */
function likeness(a, b) {
  const letters = word => word.toLowerCase().match(/[a-z0-9]/g) ?? [];
  const counts = word => letters(word).reduce((all, c) => all.set(c, (all.get(c) ?? 0) + 1), new Map());
  const product = (x, y) => [...x].reduce((sum, [c, n]) => sum + n * (y.get(c) ?? 0), 0);
  const x = counts(a), y = counts(b), length = Math.sqrt(product(x, x) * product(y, y));
  return length > 0 ? product(x, y) / length : 0;
}

const text = 'Attention is a matrix;  every\nquery gives each KEY a share, 3 of 33 - and so on and on to the end';
const words = text.split(/\s+/);
const visible = [() => true, (i, j) => j <= i, (i, j) => Math.abs(i - j) <= 3];
for (const pattern of [0, 1, 2])
  for (const sharpness of [0, 1, 8, 24]) {
    const found = attend(text, pattern, sharpness);
    check(found.words.join(' ') === words.join(' '), `the words ${found.words}`);
    words.forEach((word, i) => {
      const exponentials = words.map((other, j) => (visible[pattern](i, j) ? Math.exp(sharpness * (likeness(word, other) - 1)) : 0));
      const sum = exponentials.reduce((a, b) => a + b);
      words.forEach((_, j) => {
        const ours = found.weights[i * words.length + j];
        check(Math.abs(ours - exponentials[j] / sum) < 1e-5, `pattern ${pattern}, sharpness ${sharpness}, (${i}, ${j}): ${ours}, not ${exponentials[j] / sum}`);
      });
    });
  }
check(attend('', 0, 8).words.length === 0 && attend(' \n ', 0, 8).words.length === 0, 'no words');
check(attend('word '.repeat(100), 1, 8).words.length === 64, 'more words than it takes');
const cyrillic = attend('слово слова дом', 0, 8);
check(cyrillic.words[0] === 'слово' && cyrillic.weights[1] > 2 * cyrillic.weights[2], `letters that are not ASCII: ${cyrillic.weights}`);
process.exitCode = failures > 0 ? 1 : 0;
