// The choice of the kernel for matrix products.

import { plain } from "./numbers.js";
import { simdKernel } from "./simd.js";

/** The fastest kernel that this browser has, or the one of a name: "plain" or "simd". */
export function bestKernel(name = "simd") {
  return (name === "simd" && simdKernel()) || plain;
}
