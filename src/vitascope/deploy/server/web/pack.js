// Reads the files of attention_pack.py: safetensors with a JSON text in the metadata.

const ARRAYS = { U8: Uint8Array, I8: Int8Array, F32: Float32Array };

/** A response's numbers by name, each {shape, data}, and its metadata. Nothing is copied. */
export function unpack(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const { __metadata__: metadata, ...entries } = JSON.parse(
    new TextDecoder().decode(new Uint8Array(buffer, 8, length)),
  );
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [begin] }] of Object.entries(entries)) {
    const count = shape.reduce((product, size) => product * size, 1);
    tensors[name] = { shape, data: new ARRAYS[dtype](buffer, 8 + length + begin, count) };
  }
  return { tensors, about: JSON.parse(metadata.explorer) };
}
