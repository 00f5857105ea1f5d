// Reads the files of attention_pack.py: safetensors with a JSON text in the metadata.

const ARRAYS = { U8: Uint8Array, I8: Int8Array, F16: Uint16Array, F32: Float32Array };

/** A response's numbers by name, each {shape, data}, and its metadata. Nothing is copied. */
export function unpack(buffer) {
  const { entries, length } = header(buffer);
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [begin] = [] }] of Object.entries(entries)) {
    if (name === "__metadata__") continue;
    const count = shape.reduce((product, size) => product * size, 1);
    tensors[name] = { shape, data: numbersOf(dtype, buffer, 8 + length + begin, count) };
  }
  return { tensors, about: JSON.parse(entries.__metadata__.explorer) };
}

/** The numbers of a type in a part of a buffer, by default all of it; of float16 the bits. Nothing is copied. */
export function numbersOf(dtype, buffer, at = 0, count = undefined) {
  return new ARRAYS[dtype](buffer, at, count);
}

/** What begins a safetensors file: its entries by name, {dtype, shape, data_offsets}, and the bytes of their JSON. */
export function header(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  return { entries: JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length))), length };
}
