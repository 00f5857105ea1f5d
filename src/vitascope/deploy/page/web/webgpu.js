// The kernel for matrix products on the graphics card: those with weights, which are nearly all operations. The others,
// of attention's heads, are too small for the way there and back.

const SIDE = 16; // of a tile, which its threads read into memory of their own once

const PROGRAM = `
  struct Shape { rows: u32, outs: u32, inner: u32 }
  @group(0) @binding(0) var<storage, read> x: array<f32>; // (rows, inner)
  @group(0) @binding(1) var<storage, read> w: array<f32>; // (outs, inner)
  @group(0) @binding(2) var<storage, read_write> y: array<f32>; // (rows, outs)
  @group(0) @binding(3) var<uniform> shape: Shape;
  var<workgroup> xTile: array<array<f32, ${SIDE}>, ${SIDE}>;
  var<workgroup> wTile: array<array<f32, ${SIDE}>, ${SIDE}>;

  @compute @workgroup_size(${SIDE}, ${SIDE})
  fn product(@builtin(workgroup_id) tile: vec3u, @builtin(local_invocation_id) own: vec3u) {
    let row = tile.y * ${SIDE} + own.y;
    let out = tile.x * ${SIDE} + own.x;
    let wRow = tile.x * ${SIDE} + own.y;
    var sum = 0.0;
    for (var start = 0u; start < shape.inner; start += ${SIDE}) {
      let column = start + own.x;
      xTile[own.y][own.x] = 0.0;
      wTile[own.y][own.x] = 0.0;
      if (column < shape.inner && row < shape.rows) { xTile[own.y][own.x] = x[row * shape.inner + column]; }
      if (column < shape.inner && wRow < shape.outs) { wTile[own.y][own.x] = w[wRow * shape.inner + column]; }
      workgroupBarrier();
      for (var i = 0u; i < ${SIDE}; i++) { sum += xTile[own.y][i] * wTile[own.x][i]; }
      workgroupBarrier();
    }
    if (row < shape.rows && out < shape.outs) { y[row * shape.outs + out] = sum; }
  }
`;

/** The kernel, beside one for the small products; null where a browser offers no graphics card. */
export async function gpuKernel(beside) {
  const adapter = await globalThis.navigator?.gpu?.requestAdapter();
  return adapter ? new GpuKernel(await adapter.requestDevice(), beside) : null;
}

class GpuKernel {
  constructor(device, beside) {
    Object.assign(this, { device, beside });
    this.name = `WebGPU, and ${beside.name} for attention`;
    const module = device.createShaderModule({ code: PROGRAM });
    this.pipeline = device.createComputePipeline({ layout: "auto", compute: { module, entryPoint: "product" } });
    this.buffers = {};
  }

  /** As in numbers.js. */
  expect() {}

  /** As in numbers.js. */
  keep(outs, inner) {
    return { data: new Float32Array(outs * inner), outs, inner, stride: inner, isKept: true };
  }

  /** As in numbers.js, but a promise. */
  async product(x, rows, matrix) {
    if (!matrix.isKept) return this.beside.product(x, rows, matrix);
    const { device } = this;
    const { outs, inner } = matrix;
    const { STORAGE, COPY_DST, COPY_SRC, MAP_READ, UNIFORM } = GPUBufferUsage;
    if (matrix.data) {
      matrix.buffer = device.createBuffer({ size: 4 * outs * inner, usage: STORAGE | COPY_DST });
      device.queue.writeBuffer(matrix.buffer, 0, matrix.data);
      matrix.data = null; // it lies on the card
    }
    const size = 4 * rows * outs;
    const given = this.buffer("x", 4 * rows * inner, STORAGE | COPY_DST);
    const result = this.buffer("y", size, STORAGE | COPY_SRC);
    const shape = this.buffer("shape", 16, UNIFORM | COPY_DST);
    const read = this.buffer("read", size, COPY_DST | MAP_READ);
    device.queue.writeBuffer(given, 0, x, 0, rows * inner);
    device.queue.writeBuffer(shape, 0, Uint32Array.of(rows, outs, inner, 0));
    const entries = [given, matrix.buffer, result, shape].map((buffer, binding) => ({ binding, resource: { buffer } }));
    const commands = device.createCommandEncoder();
    const pass = commands.beginComputePass();
    pass.setPipeline(this.pipeline);
    pass.setBindGroup(0, device.createBindGroup({ layout: this.pipeline.getBindGroupLayout(0), entries }));
    pass.dispatchWorkgroups(Math.ceil(outs / SIDE), Math.ceil(rows / SIDE));
    pass.end();
    commands.copyBufferToBuffer(result, 0, read, 0, size);
    device.queue.submit([commands.finish()]);
    try {
      await read.mapAsync(GPUMapMode.READ, 0, size);
    } catch {
      throw new Error("the graphics card stopped to answer: reload the page");
    }
    const y = new Float32Array(read.getMappedRange(0, size).slice(0));
    read.unmap();
    return y;
  }

  /** A buffer of at least a size, kept for the next product. */
  buffer(name, size, usage) {
    if (!this.buffers[name] || this.buffers[name].size < size) {
      this.buffers[name]?.destroy();
      this.buffers[name] = this.device.createBuffer({ size, usage });
    }
    return this.buffers[name];
  }
}
