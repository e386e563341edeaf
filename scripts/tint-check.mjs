#!/usr/bin/env node
// Does Tint, the WGSL compiler of Chrome, accept every shader of a folder under WebGPU's default limits?
//
//   eval "$(scripts/setup-tint)"; eval "$(scripts/setup-vulkan)"
//   node scripts/tint-check.mjs FOLDER [BACKEND]
//
// For each NAME.wgsl, every compute entry point is made into a pipeline with an automatic layout. A first line
// `// features: subgroups, shader-f16` asks for device features; a file NAME.json beside it may hold
// {"constants": {...}, "features": [...], "limits": {...}, "pipelines": false}, the last for one that needs more bindings
// than any adapter here has: its module alone is checked. A shader is compiled down to a driver where one offers
// what it asks for (SwiftShader first), else by Dawn's driverless backend: Tint and the limits alone, which BACKEND
// `null` chooses for all and which takes milliseconds. Exit status 1: a shader was refused; 3: Dawn is not there.

import { existsSync, readFileSync, readdirSync } from 'node:fs';
import { basename, join } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';

const [folder, backend] = process.argv.slice(2);
if (!folder) {
  console.error('usage: tint-check.mjs FOLDER [BACKEND]');
  process.exit(2);
}

// Dawn takes the first driver that it likes: give it SwiftShader when there is one, so that all machines agree.
const drivers = (process.env.VK_DRIVER_FILES ?? '').split(':');
const swiftshader = drivers.find((driver) => /swiftshader/i.test(driver));
if (swiftshader) process.env.VK_DRIVER_FILES = process.env.VK_ICD_FILENAMES = swiftshader;

const home = process.env.KVTIDE_TINT || fileURLToPath(new URL('../.tint', import.meta.url));
const entry = join(home, 'node_modules/webgpu/index.js');
if (!existsSync(entry)) {
  console.error(`tint-check: no Dawn in ${home}: run scripts/setup-tint`);
  process.exit(3);
}
const { create, globals } = await import(pathToFileURL(entry).href);
Object.assign(globalThis, globals);

// One device for each set of features and limits, on the first backend that has them. Zeroing workgroup memory is left
// out because SwiftShader compiles it word by word: seconds for a large array, and no part of what is checked.
const quick = 'enable-dawn-features=disable_workgroup_init';
const backends = (backend ? [`backend=${backend}`] : ['', 'backend=null']).map((which) =>
  create(which ? [which, quick] : [quick]),
);
const devices = new Map();
async function deviceWith(features, limits) {
  const key = JSON.stringify([features, limits]);
  if (!devices.has(key)) devices.set(key, await openDevice(features, limits));
  return devices.get(key);
}
async function openDevice(requiredFeatures, requiredLimits) {
  for (const gpu of backends) {
    try {
      const adapter = await gpu.requestAdapter();
      const device = await adapter.requestDevice({ requiredFeatures, requiredLimits });
      return { device, name: adapter.info.description || adapter.info.device };
    } catch {
      // No driver here has them; the next backend may.
    }
  }
  throw new Error(`no adapter offers ${JSON.stringify({ requiredFeatures, requiredLimits })}`);
}

function computeEntryPoints(code) {
  const bare = code.replace(/\/\/.*|\/\*[^]*?\*\//g, ' ');
  const functions = bare.matchAll(/((?:@\w+\s*(?:\((?:[^()]|\([^()]*\))*\))?\s*)+)fn\s+(\w+)/g);
  return [...functions].filter(([, attributes]) => /@compute\b/.test(attributes)).map(([, , name]) => name);
}

// Returns the adapter's name; throws with what is wrong with the shader.
async function check(path) {
  const code = readFileSync(path, 'utf8');
  const sidecar = path.replace(/\.wgsl$/, '.json');
  const { constants = {}, features = [], limits = {}, pipelines = true } =
    existsSync(sidecar) ? JSON.parse(readFileSync(sidecar, 'utf8')) : {};
  const named = code.match(/^\/\/ features:(.*)/)?.[1].split(/[\s,]+/).filter(Boolean) ?? [];
  const { device, name } = await deviceWith([...new Set([...named, ...features])].sort(), limits);

  device.pushErrorScope('validation');
  const module = device.createShaderModule({ code });
  const { messages } = await module.getCompilationInfo();
  const refused = await device.popErrorScope();
  const lines = messages.map((m) => `${m.lineNum}:${m.linePos}: ${m.type}: ${m.message}`);
  if (refused || messages.some((m) => m.type === 'error')) throw new Error(lines.join('\n') || refused.message);
  for (const line of lines) console.log(`${basename(path)}:${line}`);

  const entryPoints = computeEntryPoints(code);
  if (entryPoints.length === 0) throw new Error('no compute entry point');
  for (const entryPoint of pipelines ? entryPoints : []) {
    try {
      await device.createComputePipelineAsync({ layout: 'auto', compute: { module, entryPoint, constants } });
    } catch (error) {
      throw new Error(`${entryPoint}: ${error.message.trim()}`);
    }
  }
  return name;
}

let failed = 0;
const accepted = new Map();
for (const file of readdirSync(folder).filter((name) => name.endsWith('.wgsl')).sort()) {
  try {
    const adapter = await check(join(folder, file));
    accepted.set(adapter, (accepted.get(adapter) ?? 0) + 1);
  } catch (error) {
    failed += 1;
    console.log(`${file}: refused\n  ${error.message.replaceAll('\n', '\n  ')}`);
  }
}
const total = [...accepted.values()].reduce((sum, count) => sum + count, 0);
if (failed) console.log(`${failed} shaders refused by Tint`);
const where = [...accepted].map(([adapter, count]) => `${count} on ${adapter}`).join(', ');
console.log(`${total} shaders accepted by Tint${where && ` (${where})`}`);
if (total + failed === 0) console.error(`tint-check: no .wgsl file in ${folder}`);
process.exit(failed || total === 0 ? 1 : 0);
