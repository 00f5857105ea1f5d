// A picture's file to an ImageBitmap. The page does it, because in a file from the disk WebKit (Safari) reads no
// blob in a worker.

const PNG = [0x89, 0x50, 0x4e, 0x47];

/** The decoded picture, which can be handed to a worker; an error if it is none or has more bits than 8. */
export async function decoded(picture, framing) {
  await checkBits(picture, framing);
  try {
    return await createImageBitmap(picture, {
      imageOrientation: framing.exif_orientation ? "from-image" : "none",
      colorSpaceConversion: "none",
      premultiplyAlpha: "none",
    });
  } catch {
    throw new Error("not a picture that this browser can read, or one that is too large for it");
  }
}

/** A browser reads 8 bits per value, so where the model has levels for more it would be wrong. */
async function checkBits(picture, { levels }) {
  if (!levels) return;
  const start = new Uint8Array(await picture.slice(0, 26).arrayBuffer());
  if (PNG.every((byte, place) => start[place] === byte) && start[24] === 16) {
    throw new Error("a picture of 16 bits, which a browser reduces to 8; use `vitascope predict`");
  }
}
