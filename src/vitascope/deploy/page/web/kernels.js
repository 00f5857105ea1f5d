// The kernels for matrix products, fastest first.

import { plain } from "./numbers.js";

/** The fastest kernel that this browser has, or the one of a name. */
export async function bestKernel(name) {
  return plain;
}
