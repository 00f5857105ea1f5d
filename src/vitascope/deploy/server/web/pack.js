// Reads the files of attention_pack.py: safetensors with a JSON text in the metadata.

const ARRAYS = { U8: Uint8Array, I8: Int8Array, F16: Uint16Array, F32: Float32Array };

/** A response's numbers by name, each {shape, data}, and its metadata. Nothing is copied. */
export function unpack(buffer) {
  const { __metadata__: metadata } = header(buffer).entries;
  return { tensors: tensorsOf(buffer), about: JSON.parse(metadata.explorer) };
}

/** The tensors of a safetensors file by name, each {shape, data}; of float16 the bits. Nothing is copied. */
export function tensorsOf(buffer) {
  const { entries, length } = header(buffer);
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [begin] = [] }] of Object.entries(entries)) {
    if (name === "__metadata__") continue;
    const count = shape.reduce((product, size) => product * size, 1);
    tensors[name] = { shape, data: new ARRAYS[dtype](buffer, 8 + length + begin, count) };
  }
  return tensors;
}

function header(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  return { entries: JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length))), length };
}
