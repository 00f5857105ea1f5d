"""The sections that benchmarks write into a page, in Chinese, for the Chinese page beside it."""

from __future__ import annotations

import re

TEXTS = {
    # headers of tables
    "option": "选项",
    "test accuracy, %": "测试准确率，%",
    "lowest to highest": "最低–最高",
    "parameters": "参数量",
    "MFLOPs": "MFLOPs",
    "training, images/s": "训练，张/秒",
    "attention": "注意力",
    "in the limit": "极限",
    "formula": "公式",
    "time, forward": "用时，前向",
    "time, with backward": "用时，含反向",
    "memory, unfused, with backward": "内存，未融合，含反向",
    "memory, fused, with backward": "内存，融合，含反向",
    "test": "测试",
    "images": "图像数",
    "share": "比例",
    "epochs": "epoch 数",
    "model": "模型",
    "training, s (median)": "训练，秒（中位数）",
    # cells
    "ViT": "ViT",
    "hybrid": "混合模型",
    "ResNet": "ResNet",
    "base": "基准",
    "global": "global",
    "axial": "axial",
    "window": "window",
    # pictures
    "time and memory of attention by the side of the grid": "注意力的用时和内存随网格边长的变化",
    "test accuracy by the number of training images": "测试准确率随训练图像数的变化",
    # paragraphs
    "On a grid of 96x96:": "在 96x96 的网格上：",
    '"option": the change to the base, the recipe `digits`: 32x32 pixels, 16 patches of 8x8, 3 blocks of '
    'width 96, 6 heads, learned positions, a class token. "test accuracy": mean over the seeds on the 360 '
    "test digits; one digit is 0.28. Differences within the spread of the seeds mean nothing, and the best "
    'option here need not be the best on photographs. "MFLOPs": the matrix products of one image\'s '
    'forward pass, two per multiply-add. "training": images per second of training steps (forward, loss, '
    "backward, AdamW) at the recipe's batch size in fp32 on one thread, without augmentation. Labels train "
    "both heads of `distillation_token` here; there is no teacher. `resnet_layers=[1] resnet_width=16` has "
    "a stride of 4: patches of 8 pixels are 4x4 patches of 2x2 features. With `mlp_ratio=2.667`, SwiGLU "
    "has as many parameters as the base's MLP.": (
        "“选项”：相对基准的改动，基准是训练方案 `digits`：32x32 像素，16 个 8x8 的图像块，3 层，宽度 96，"
        "6 个头，可学习的位置编码，class token。“测试准确率”：在 360 个测试数字上对各随机种子取平均；一个"
        "数字相当于 0.28。随机种子波动范围之内的差异没有意义，这里最好的选项在照片上也未必最好。“MFLOPs”"
        "：一张图像的前向传播中的矩阵乘积，一次乘加计为两次运算。“训练”：每秒训练的图像数（前向、损失、反"
        "向、AdamW），采用训练方案的批大小，fp32，单线程，不含数据增强。这里 `distillation_token` 的两个"
        "头都用标签训练，没有教师。`resnet_layers=[1] resnet_width=16` 的步长为 4：边长 8 像素的图像块即 "
        "4x4 个图像块，每块含 2x2 个特征。采用 `mlp_ratio=2.667` 时，SwiGLU 的参数量与基准的 MLP 相同。"
    ),
    "Exponents of the cost in the grid's side: the slope of a line through the logarithms, over grids of "
    'at least 2,000 patches. "formula": the exponent of `ViTConfig.attended_pairs` on the same grids. '
    '"unfused": peak memory without PyTorch\'s fused kernels, so that all attention weights are in memory. '
    '"fused": with the kernels that the model uses on such grids. They hold a small part of the weights at '
    "a time, so memory grows with the number of tokens. Axial attention also copies patches into rows and "
    "columns. The time and memory of the copies grow with the number of tokens too, which keeps its "
    "exponents below the formula's.": (
        "代价随网格边长增长的指数：在至少有 2,000 个图像块的网格上，对数拟合直线的斜率。“公式”："
        "`ViTConfig.attended_pairs` 在同样的网格上的指数。“未融合”：不用 PyTorch 的融合算子时的峰值内存，"
        "这时全部注意力权重都在内存中。“融合”：采用模型在这种网格上使用的算子，它每次只保存一小部分权重，"
        "所以内存随 token 数增长。轴向注意力还要把图像块复制成行和列，复制的用时和内存也随 token 数增长，"
        "所以它的指数低于公式。"
    ),
    'The cost of global attention divided by that of the others; below 1, they cost more. "formula": the '
    "ratio of pairs. The measured ratios are lower because of short rows and windows, and because patches "
    "are copied into them.": (
        "全局注意力的代价除以其他注意力的代价；小于 1 表示其他注意力的代价更高。“公式”：图像块对的数目之"
        "比。测得的比值较低，因为行和窗口都很短，并且要把图像块复制到其中。"
    ),
    "Test accuracy in %: the mean over the seeds, with the lowest and the highest if there are several, "
    'always on all test images. "images": training images, a share of each class. "ViT": the recipe '
    '`small-data` with one convolution that makes the patches, as in the paper. "hybrid": with the '
    'convolutional tokenizer instead. "ResNet": the recipe `cnn`. All three have the same augmentation, '
    "optimizer, batch size and number of epochs. The learning rate is the best of those tried, by the "
    "validation accuracy of runs with half of the epochs. In parentheses: the gain over the best of these "
    "shorter runs, in points.": (
        "测试准确率，以 % 表示：各随机种子的平均值；有多个种子时附最低值和最高值；总是用全部测试图像。“图"
        "像数”：训练图像，取每个类别的一部分。“ViT”：训练方案 `small-data`，像论文那样用一个卷积得到图像"
        "块。“混合模型”：改用卷积 tokenizer。“ResNet”：训练方案 `cnn`。三者的数据增强、优化器、批大小和 "
        "epoch 数都相同。学习率是尝试过的值中最好的一个，根据 epoch 数减半的训练的验证准确率选择。括号内"
        "：相对这些较短训练中最好的一次的提升，单位为百分点。"
    ),
}
"""Headers of tables, cells, descriptions of pictures and paragraphs. Each stands here once."""

CONDITIONS = (
    (r"^One image\b", "一张图像"),
    (r"(\d+) seeds\b", r"\1 个随机种子"),
    (r"\bseeds: (\d+)", r"随机种子数：\1"),
    (r"(\d+) epochs\b", r"\1 个 epoch"),
    (r"(\d+) heads of (\d+)\b", r"\1 个头，每个 \2 维"),
    (r"\bone thread\b", "单线程"),
    (r"\bbatches of (\d+)\b", r"批大小 \1"),
    (r"\blearning rates tried: ", "尝试的学习率："),
    (r" \(up to ([\d.]+%) of the images\)", r"（图像不超过 \1 时）"),
    (r"(\d+) cores\b", r"\1 核"),
    (r"(\d+) threads\b", r"\1 线程"),
    (r"\bno bf16 units\b", "无 bf16 单元"),
    (r"\bload average ([\d.]+) at the start", r"开始时平均负载 \1"),
    (r"\bretrained later, after a change to the option: ", "以下选项改动之后重新训练："),
    (r"; ", "；"),
    (r", ", "，"),
    (r"\.$", "。"),
)
"""Expressions of the last paragraph, the conditions of the measurement, and their replacements, in order."""


def in_chinese(section: str) -> str:
    """A section between the markers of an English page, in Chinese.

    Raises:
        KeyError: a text that `TEXTS` does not have.
    """
    if not section.strip():
        return section
    *parts, conditions = section.strip().split("\n\n")
    for pattern, words in CONDITIONS:
        conditions = re.sub(pattern, words, conditions)
    return "\n\n".join([*map(_translated, parts), conditions]) + "\n"


def _translated(part: str) -> str:
    if picture := re.fullmatch(r"!\[(.*)\]\((.*)\)", part):
        return f"![{TEXTS[picture[1]]}]({picture[2]})"
    if not part.startswith("|"):
        return TEXTS[" ".join(part.split())]
    return "\n".join(
        f"| {' | '.join(map(_cell, line.strip('| ').split('|')))} |" for line in part.splitlines()
    )


def _cell(text: str) -> str:
    """A cell: words in Chinese; numbers, rules and options as they are."""
    text = re.sub(r"(\d) to (\d)", r"\1–\2", text.strip())
    return TEXTS[text] if re.search("[A-Za-z]{2}", text) and "=" not in text else text
