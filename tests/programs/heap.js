// Objects, maps, strings and buffers in the main thread and in worker threads; the collector walks them. Prints digests.
'use strict';
const { Worker, isMainThread, parentPort, workerData } = require('worker_threads');
const crypto = require('crypto');

function work(size, seed) {
  const map = new Map();
  for (let i = 0; i < size; i++) map.set(`key ${(i * 7919 + seed) % 1000003}`, { i, text: `value ${i * seed}`, list: [i, i + 1] });
  let sum = 0;
  for (let round = 0; round < 3; round++)
    for (const [key, value] of map) sum = (sum + value.list[round % 2] + key.length + value.text.length) % 1e9;
  const buffer = Buffer.alloc(size * 100);
  for (let i = 0; i < buffer.length; i += 4) buffer.writeUInt32LE((i * 2654435761) >>> 0, i);
  const numbers = new Float64Array(size * 4);
  for (let i = 0; i < numbers.length; i++) numbers[i] = (i * 48271) % 2147483647;
  numbers.sort();
  const hash = crypto.createHash('sha256').update(buffer).update(new Uint8Array(numbers.buffer)).digest('hex').slice(0, 16);
  return `${map.size} ${sum} ${hash}`;
}

if (isMainThread) {
  const size = Number(process.argv[2]);
  const results = [];
  let running = 2;
  for (let id = 0; id < 2; id++)
    new Worker(__filename, { workerData: { size: size / 2, seed: id + 3 } }).on('message', (text) => {
      results[id] = text;
      if (--running === 0) console.log(results.join('\n'));
    });
  console.log(work(size, 1));
  const json = JSON.stringify(Array.from({ length: size }, (_, i) => ({ i, name: `n${i}` })));
  console.log(JSON.parse(json).length, crypto.createHash('sha256').update(json).digest('hex').slice(0, 16));
} else {
  parentPort.postMessage(work(workerData.size, workerData.seed));
}
