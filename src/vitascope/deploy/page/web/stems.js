// From an image to patches, x_p E of equation 1, as matrix products.

import { ACTIVATIONS, each, transposed } from "./numbers.js";

/** (C, H, W) -> (N, D), by the option `stem`. */
export async function patches(vit, image) {
  if (vit.options.stem === "tokenizer") return tokenizer(vit, image);
  const { patch_size: size, patch_stride: stride, grid, in_channels: C, image_hw } = vit.options;
  const x = await vit.linear("patch_embedding", windows(image, [C, ...image_hw], size, stride, grid, [0, 0]));
  return vit.options.patch_norm ? vit.norm("patch_embedding.norm", x) : x;
}

/** 3x3 convolutions, some of which halve the image by 3x3 max pooling (Hassani et al. 2021). */
async function tokenizer(vit, image) {
  const { tokenizer_channels: channels, tokenizer_pools: pools, image_hw } = vit.options;
  let [maps, shape] = [image, [channels[0], ...image_hw]];
  for (let layer = 0; layer + 1 < channels.length; layer++) {
    const [, H, W] = shape;
    const unfolded = windows(maps, shape, [3, 3], [1, 1], [H, W], [1, 1]);
    let places = await vit.linear(`patch_embedding.${layer}.conv`, unfolded); // (H W, channels)
    shape = [channels[layer + 1], H, W];
    if (pools[layer]) [places, shape] = pooled(places, shape);
    each(places, ACTIVATIONS[vit.options.tokenizer_activation]);
    if (layer + 2 === channels.length) return places;
    maps = transposed(places, shape[1] * shape[2], shape[0]); // (C, H, W)
  }
}

/**
 * The windows of an image as rows, ordered by channel, row and column as a kernel is: (C, H, W) -> (n, C h w).
 *
 * `grid` is the number of windows down and across, `padding` the zeros above and to the left of the image.
 */
function windows(image, [C, H, W], [h, w], [down, across], [rows, columns], [top, left]) {
  const found = new Float32Array(rows * columns * C * h * w);
  let at = 0;
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      for (let c = 0; c < C; c++) {
        for (let y = row * down - top; y < row * down - top + h; y++) {
          for (let x = column * across - left; x < column * across - left + w; x++) {
            if (y >= 0 && y < H && x >= 0 && x < W) found[at] = image[(c * H + y) * W + x];
            at++;
          }
        }
      }
    }
  }
  return found;
}

/** 3x3 max pooling of stride 2, padded by one: (H W, C) -> (H' W', C) and the new shape. */
function pooled(places, [C, H, W]) {
  const [rows, columns] = [Math.ceil(H / 2), Math.ceil(W / 2)];
  const found = new Float32Array(rows * columns * C).fill(-Infinity);
  for (let y = 0; y < H; y++) {
    for (let x = 0; x < W; x++) {
      for (const row of covering(y, rows)) {
        for (const column of covering(x, columns)) {
          const [from, to] = [(y * W + x) * C, (row * columns + column) * C];
          for (let c = 0; c < C; c++) if (places[from + c] > found[to + c]) found[to + c] = places[from + c];
        }
      }
    }
  }
  return [found, [C, rows, columns]];
}

/** The windows over a place: one for an even place, two for an odd one unless the image ends. */
function covering(place, count) {
  const last = (place + 1) / 2;
  if (place % 2 === 0) return [place / 2];
  return last < count ? [last - 1, last] : [last - 1];
}
