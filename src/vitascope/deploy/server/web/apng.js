// Animated PNGs: the frames of several PNG files in one (W3C, Portable Network Graphics, third edition, chapter 4.9).

const SIGNATURE = 8; // bytes
const CRC = Uint32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = byte & 1 ? 0xedb88320 ^ (byte >>> 1) : byte >>> 1;
  return byte;
});

/** An animated PNG that repeats frames, PNG files of the same size, each shown for some milliseconds. */
export async function animated(frames, milliseconds) {
  const files = await Promise.all(frames.map(async (frame) => new Uint8Array(await frame.arrayBuffer())));
  const parsed = files.map((file) => [...chunks(file)]);
  const header = parsed[0].find(({ type }) => type === "IHDR").data;
  const parts = [files[0].subarray(0, SIGNATURE), chunk("IHDR", header), chunk("acTL", numbers(frames.length, 0))];
  let sequence = 0;
  parsed.forEach((frame, at) => {
    const size = header.subarray(0, 8); // width and height
    const delay = new Uint8Array([milliseconds >> 8, milliseconds & 255, 1000 >> 8, 1000 & 255, 0, 0]);
    parts.push(chunk("fcTL", numbers(sequence++), size, numbers(0, 0), delay));
    for (const { data } of frame.filter(({ type }) => type === "IDAT")) {
      parts.push(at === 0 ? chunk("IDAT", data) : chunk("fdAT", numbers(sequence++), data));
    }
  });
  return new Blob([...parts, chunk("IEND")], { type: "image/png" });
}

/** The chunks of a PNG file: {type, data}. */
function* chunks(file) {
  const view = new DataView(file.buffer, file.byteOffset);
  for (let at = SIGNATURE; at < file.length; ) {
    const length = view.getUint32(at);
    yield { type: String.fromCharCode(...file.subarray(at + 4, at + 8)), data: file.subarray(at + 8, at + 8 + length) };
    at += 12 + length;
  }
}

function chunk(type, ...parts) {
  const length = parts.reduce((sum, part) => sum + part.length, 0);
  const bytes = new Uint8Array(12 + length);
  bytes.set(numbers(length));
  bytes.set(Uint8Array.from(type, (letter) => letter.charCodeAt(0)), 4);
  let at = 8;
  for (const part of parts) {
    bytes.set(part, at);
    at += part.length;
  }
  bytes.set(numbers(crc(bytes.subarray(4, at))), at);
  return bytes;
}

/** Numbers as 32-bit big-endian bytes. */
function numbers(...values) {
  const bytes = new Uint8Array(4 * values.length);
  values.forEach((value, at) => new DataView(bytes.buffer).setUint32(4 * at, value));
  return bytes;
}

function crc(bytes) {
  let rest = 0xffffffff;
  for (const byte of bytes) rest = CRC[(rest ^ byte) & 255] ^ (rest >>> 8);
  return (rest ^ 0xffffffff) >>> 0;
}
