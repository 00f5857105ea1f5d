// The page in Chinese, where the browser's language is: texts are replaced as they appear in the document.
//
// Names of classes and files, commands, errors and what is drawn on canvases stay as they are.

const TEXTS = {
  "vitascope: attention explorer": "vitascope：注意力浏览器",
  "attention explorer": "注意力浏览器",
  "Compare": "对比",
  "Save PNG": "保存 PNG",
  "Copy PNG": "复制 PNG",
  "Copy link": "复制链接",
  "Point at the picture: a Vision Transformer cuts it into patches, and the colours show from which others that patch takes information.":
    "把指针移到图片上：Vision Transformer 把图片切成图像块，颜色表示这个图像块从哪些图像块获取信息。",
  "Tap the picture: a Vision Transformer cuts it into patches, and the colours show from which others that patch takes information.":
    "点按图片：Vision Transformer 把图片切成图像块，颜色表示这个图像块从哪些图像块获取信息。",
  "Similarity": "相似度",
  "Attention of one layer: the share that each patch has in what the query reads.":
    "一层的注意力：每个图像块在查询所读取的信息中占的比例。",
  "The attention of all layers multiplied: how much of each patch arrives at the query.":
    "各层注意力相乘：每个图像块有多少信息到达查询。",
  "The cosine of the patch’s features with those of every patch, after the last layer.":
    "最后一层之后，这个图像块的特征与每个图像块特征的余弦。",
  "The three main components of the patches’ features, as red, green and blue.":
    "图像块特征的前三个主成分，分别显示为红、绿、蓝。",
  "The evidence for a class in each place. Methods differ: compare them.":
    "每个位置支持某个类别的证据。各种方法的结果不同，请对比。",
  "What is a query?": "什么是查询？",
  "What is a layer?": "什么是层？",
  "What is a head?": "什么是头？",
  "A layer lets every token read from all others, and then changes each token by itself. The layers follow each other, so what a patch knows comes from further away with each of them.":
    "每一层先让每个 token 读取所有其他 token，再单独变换每个 token。各层依次进行，所以每过一层，图像块的信息就来自更远的地方。",
  "A layer has several heads. Each has its own attention, so that one head can look at the neighbours while another looks at what is similar. Their results are joined.":
    "一层有多个头，每个头有自己的注意力：一个头可以关注相邻的图像块，另一个头可以关注相似的图像块。各头的结果拼接起来。",
  "The map belongs to one query: the patch under the pointer, or a token without a place. The class token is such a token: the model reads the class from it. Registers are tokens that nothing reads.":
    "图属于一个查询：指针下的图像块，或没有位置的 token。class token 就是这样的 token，模型从它读出类别。寄存器（register）是没有别处读取的 token。",
  "Play the layers": "逐层播放",
  "Save all": "全部保存",
  "Samples": "示例",
  "Model": "模型",
  "Engine": "推理引擎",
  "Cancel": "取消",
  "Copied": "已复制",
  "Copied, without picture": "已复制（不含图片）",
  "Saved": "已保存",
  "Not allowed": "不允许",
  "Dark or light": "深色或浅色",
  "Help and keys": "帮助和按键",
  "Pictures": "图片",
  "View": "视图",
  "Kind of map": "图的种类",
  "Attention": "注意力",
  "Rollout": "Rollout",
  "Class map": "类别热力图",
  "Whose attention": "谁的注意力",
  "Layer": "层",
  "In the last layer the head does not read the patches, so their attention there was never trained.":
    "最后一层的图像块不被分类头读取，所以它们在这一层的注意力没有经过训练。",
  "Head": "头",
  "Method": "方法",
  "Any class …": "任意类别……",
  "Find a class by name or number": "按名称或编号查找类别",
  "Every head": "所有头",
  "layers down, heads across": "纵向为层，横向为头",
  "layers across, heads down": "横向为层，纵向为头",
  "this layer only": "只看这一层",
  "Overlay": "叠加强度",
  "smooth": "平滑",
  "the model’s pixels": "模型看到的像素",
  "Change picture": "更换图片",
  "Remove this picture": "移除这张图片",
  "picture in patches": "分成图像块的图片",
  "Drop a picture here": "把图片拖到这里",
  "Choose a picture": "选择图片",
  "or paste one": "或粘贴图片",
  ", or try a sample above": "，或试试上面的示例",
  "The model is looking …": "模型正在计算……",
  "Try again": "重试",
  "Attention to patches and to other tokens": "对图像块和其他 token 的注意力",
  "No class reaches its threshold.": "没有类别达到阈值。",
  "Prediction": "预测",
  "How to look around": "使用方法",
  "Move over the picture: the map shows where the patch under the pointer looks. Click a patch to hold it, and move on to read its weight anywhere. Click a head in the wall, or a class in the prediction.":
    "在图片上移动指针：热力图显示指针下的图像块关注哪里。点击图像块可将它固定，再移动指针，即可读取它对任意位置的权重。也可以点击总览中的头，或预测中的类别。",
  "Tap a patch: the map shows where it looks. Tap a head in the wall, or a class in the prediction.":
    "点按图像块：热力图显示它关注哪里。也可以点按总览中的头，或预测中的类别。",
  "hold the next patch": "固定相邻的图像块",
  "layer before, after": "上一层、下一层",
  "head before, after": "上一个头、下一个头",
  "mean of the heads": "各头的平均",
  "the class token, or what the head reads": "class token，或分类头读取的 token",
  "or": "或",
  "follow the pointer again": "重新跟随指针",
  "attention, rollout, similarity, principal components, class map": "注意力、rollout、相似度、主成分、类别热力图",
  "open a picture, save a PNG": "打开图片、保存 PNG",
  "this help": "显示本帮助",
  "Layers, heads, rows and columns count from 0, as everywhere in vitascope. Attention is where information comes from; a class map shows the evidence for a class. They answer different questions.":
    "层、头、行、列都从 0 开始编号，与 vitascope 的其他部分一致。注意力表示信息来自哪里，类别热力图表示支持某个类别的证据，二者回答不同的问题。",
  "Close": "关闭",
  "This server requires a token": "此服务需要访问令牌",
  "It is kept until this tab is closed.": "令牌保留到此标签页关闭为止。",
  "Bearer token": "访问令牌",
  "Continue": "继续",
  // made by the other modules
  "follow the pointer": "跟随指针",
  "Mean of the heads": "各头的平均",
  "mean": "平均",
  "all patches": "所有图像块",
  "class token and all patches": "class token 和所有图像块",
  "class and distillation tokens": "class token 和蒸馏 token",
  "distillation token": "蒸馏 token",
  "too many tokens to show": "token 太多，无法显示",
  "most": "最大",
  "no head": "没有分类头",
  "This model has no head: it has attention and features, but no predictions and no class maps.":
    "这个模型没有分类头：有注意力和特征，没有预测和类别热力图。",
  "mean of all patches": "所有图像块的平均",
  "Principal components: equal colours mean similar features": "主成分：颜色相同表示特征相似",
  "A ResNet has no attention. Class maps show the evidence for a class.":
    "ResNet 没有注意力。类别热力图表示支持某个类别的证据。",
  "An exported file returns only its outputs. To look inside, serve the model that it was made from.":
    "导出的文件只返回输出。要观察内部，请用导出它的模型提供服务。",
};

// Texts with values: a part in ‹› is translated itself.
const PATTERNS = [
  [/^(.+)\. ((?:Layer \d|Rollout: |Similarity to |Principal ).+)$/s, "‹$1›。‹$2›"],
  [/^Prediction: (.+)$/s, "预测：$1"],
  [/^Similarity to the (.+)$/, "与‹$1›的相似度"],
  [/^([\d.]+%), ([\d.]+) × uniform$/, "$1，均匀分布的 $2 倍"],
  [/^Layer (\d+), (.+): where (?:the )?(.+) looks?$/, "第 $1 层，‹$2›：‹$3›关注哪里"],
  [/^Rollout: flow into (?:the )?(.+), over all layers$/, "Rollout：经过所有层流入‹$1›的信息"],
  [/^(.+): evidence for “(.*)”$/s, "$1：支持“$2”的证据"],
  [/^(.+): no evidence for “(.*)”$/s, "$1：没有支持“$2”的证据"],
  [/^patch in row (\d+), column (\d+)( ×)?$/, "第 $1 行、第 $2 列的图像块$3"],
  [/^row (\d+), column (\d+)$/, "第 $1 行、第 $2 列"],
  [/^row (\d+), column (\d+): (.+)$/, "第 $1 行、第 $2 列：$3"],
  [/^(\d+) of (0–\d+)$/, "$1（$2）"],
  [/^[Hh]ead (\d+)$/, "头 $1"],
  [/^layer (\d+), head (\d+)$/, "第 $1 层，头 $2"],
  [/^layer (\d+)$/, "第 $1 层"],
  [/^(.+); choose a layer to load it$/, "‹$1›；选择一层即可加载"],
  [/^(.+); not all fit into a response$/, "‹$1›；一次响应放不下全部"],
  [/^(.+); most at (.+)$/s, "‹$1›；最大值在‹$2›"],
  [/^Every head, of the same query\. (.+)$/s, "所有头，查询相同。‹$1›"],
  [/^Computing (.+) …$/, "正在计算 $1……"],
  [/^Fetching layer (\d+) …$/, "正在加载第 $1 层……"],
  [/^Unpacking the model, (\d+%) …$/, "正在解包模型，$1……"],
  [/^The model is looking, (\d+%) …$/, "模型正在计算，$1……"],
  [/^Sample: (.+)$/s, "示例：$1"],
  [/^(.* · )?(\d+) layers × (\d+) heads · (\d+×\d+) patches · (.+)$/s, "$1$2 层 × $3 个头 · $4 个图像块 · ‹$5›"],
  [/^(\d+×\d+) pixels · ([\d,]+) classes( · .+)?$/s, "$1 像素 · $2 个类别$3"],
  [/^(\d+×\d+) pixels · no head( · .+)?$/s, "$1 像素 · 没有分类头$2"],
];

const KEPT = ".name, .predictions *, #found *, #command *, .fault span"; // names, commands, errors
const ATTRIBUTES = ["aria-label", "aria-roledescription", "placeholder", "title"];

/** A text in Chinese; what has no translation remains as it is. */
function inChinese(text) {
  if (Object.hasOwn(TEXTS, text)) return TEXTS[text];
  for (const [pattern, words] of PATTERNS) {
    const found = pattern.exec(text);
    if (!found) continue;
    const filled = words.replace(/\$(\d)/g, (_, place) => found[place] ?? "");
    return filled.replace(/‹([^›]*)›/gs, (_, part) => inChinese(part));
  }
  return text;
}

function isKept(element) {
  return element.closest(KEPT) !== null;
}

function translateText(node) {
  const text = node.data.replace(/\s+/g, " ").trim();
  const said = text && !isKept(node.parentElement ?? document.body) ? inChinese(text) : text;
  if (said !== text) node.data = node.data.replace(/\S.*\S|\S/s, () => said);
}

function translateAttribute(element, name) {
  const text = element.getAttribute(name);
  const said = text && !isKept(element) ? inChinese(text) : text;
  if (said !== text) element.setAttribute(name, said);
}

/** An element, or a fragment, with all that it contains. */
function translateAll(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT);
  for (let node = root; node; node = walker.nextNode()) {
    if (node.nodeType === Node.TEXT_NODE) translateText(node);
    for (const name of node.attributes ? ATTRIBUTES : []) translateAttribute(node, name);
    if (node instanceof HTMLTemplateElement) translateAll(node.content);
  }
}

/** Translate the page, and what is changed in it, in a browser whose language is Chinese. */
export function translatePage() {
  if (!navigator.language.startsWith("zh")) return;
  document.documentElement.lang = "zh-CN";
  translateAll(document.documentElement);
  const changed = new MutationObserver((records) => {
    for (const { type, target, addedNodes, attributeName } of records) {
      if (type === "characterData") translateText(target);
      else if (type === "attributes") translateAttribute(target, attributeName);
      else addedNodes.forEach(translateAll);
    }
  });
  const everything = { subtree: true, childList: true, characterData: true, attributes: true };
  changed.observe(document.documentElement, { ...everything, attributeFilter: ATTRIBUTES });
}
