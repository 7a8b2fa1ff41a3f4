// node wasi.mjs PROGRAM [ARGUMENT...]: runs a program of WebAssembly, which sees all files.
import { readFile } from 'node:fs/promises';
import { argv, env } from 'node:process';
import v8 from 'node:v8';
import { WASI } from 'node:wasi';

v8.setFlagsFromString('--no-flush-bytecode'); // of this, while a program runs for long: node 20 crashed as it returned

const wasi = new WASI({ version: 'preview1', args: argv.slice(2), env, preopens: { '/': '/' }, returnOnExit: true });
const { instance } = await WebAssembly.instantiate(await readFile(argv[2]), { wasi_snapshot_preview1: wasi.wasiImport });
process.exitCode = wasi.start(instance);
