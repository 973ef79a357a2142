// The explorer's page. Pictures are addresses of the server; numbers come as JSON.

const at = (id) => document.getElementById(id);
const frames = ["image", "colour", "map", "delta"].map((id) => at(id).parentElement);

let model;
let names; // one for each class, no two alike
let shown = null; // {id, name, predictions} of the image
let chosen = null; // index of the class that is explained
let values = null; // contributions of its pixels
let pointed = null; // [column, row] of the pixel that is read
let place = null; // [column, row] of the pixel that units are asked for

const working = new Map(); // what is being done, by the task that does it
let trouble = "";

function tell() {
  const sentence = trouble || ([...working.values()].at(-1) ?? "");
  at("message").textContent = sentence;
  at("message").hidden = !sentence;
  at("message").classList.toggle("busy", !trouble);
}

function complain(sentence) {
  trouble = sentence;
  tell();
}

// Work that may be asked for again before it is done: what is late by then shows nothing.
function task(sentence, work) {
  let last = 0;
  const run = async (...given) => {
    const mine = ++last;
    const current = () => mine === last;
    working.set(run, sentence);
    complain("");
    try {
      await work(current, ...given);
    } catch (error) {
      if (current()) trouble = error.message;
    }
    if (current()) run.cancel();
  };
  run.cancel = () => {
    last += 1;
    working.delete(run);
    tell();
  };
  return run;
}

async function ask(address, options) {
  let answer;
  try {
    answer = await fetch(address, options);
  } catch {
    throw new Error("The server does not answer: is it still running?");
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  throw new Error(told.error ?? `The server answered ${answer.status}.`);
}

const json = async (address, options) => (await ask(address, options)).json();

function element(kind, content = "", attributes = {}) {
  const made = document.createElement(kind);
  made.textContent = content;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// The image.

const open = task("The network looks at the image …", async (current, request) => {
  const found = await request();
  if (!current()) return;
  shown = found;
  chosen = place = null;
  at("waiting").hidden = true;
  at("searching").hidden = false;
  at("shown").hidden = false;
  at("imagename").textContent = found.name;
  show(at("image"), `/api/images/${found.id}.png`);
  showUnits.cancel();
  at("units").replaceChildren();
  document.querySelectorAll(".place").forEach((mark) => mark.remove());
  const [best, second] = found.predictions;
  at("other").value = second?.index ?? best.index;
  explain(best.index);
});

const openFile = (file) => {
  const form = new FormData();
  form.append("file", file, file.name || "pasted image");
  return open(() => json("/api/images", { method: "POST", body: form }));
};

const openSample = (index) => open(() => json(`/api/samples/${index}`, { method: "POST" }));

// A class.

const explain = task("The network explains the class …", async (current, index) => {
  const image = shown;
  const others = [Number(at("other").value), chosen, ...image.predictions.map((p) => p.index)];
  at("other").value = others.find((other) => other !== null && other !== index) ?? index;
  for (const [i, option] of [...at("other").options].entries()) option.disabled = i === index;
  chosen = index;
  values = null;
  listPredictions();
  readPixel();
  at("title").textContent = `Why “${names[index]}”?`;
  at("sum").textContent = "…";
  const base = `/api/images/${image.id}/classes/${index}`;
  showColour();
  show(at("map"), `${base}/map.png`);
  showDelta();
  try {
    const numbers = await json(base);
    const bytes = await (await ask(`${base}/contributions`)).arrayBuffer();
    if (!current()) return;
    values = new Float32Array(bytes);
    if (!image.predictions.some((p) => p.index === index)) image.predictions.push(numbers);
    listPredictions();
    readPixel();
    at("sum").textContent =
      `Contributions ${signed(numbers.sum)} and bias ${signed(numbers.bias)} make the logit ` +
      `${signed(numbers.logit)}, ` +
      `probability ${percent(numbers.probability)}; W(x) misses the logit by ` +
      `${Math.abs(numbers.residual).toExponential(1)}.`;
  } catch (error) {
    if (current()) at("sum").textContent = "";
    throw error;
  }
});

function listPredictions() {
  const list = at("predictions");
  const focused = list.contains(document.activeElement);
  const rows = shown.predictions.map((p) => {
    const button = element("button", "", { type: "button", "aria-pressed": p.index === chosen });
    const bar = element("span", "", { class: "bar" });
    bar.append(element("i", "", { style: `width: ${100 * p.probability}%` }));
    button.append(element("span", names[p.index]), element("span", percent(p.probability)), bar);
    button.onclick = () => explain(p.index);
    const row = element("li");
    row.append(button);
    return row;
  });
  list.replaceChildren(...rows);
  if (focused) list.querySelector("[aria-pressed=true]")?.focus();
}

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;
const percent = (share) => `${(100 * share).toFixed(share < 0.001 ? 3 : 1)} %`;

function showColour() {
  const style = at("style").value;
  show(at("colour"), `/api/images/${shown.id}/classes/${chosen}/colour.png?style=${style}`);
}

function showDelta() {
  if (model.classes.length < 2) return;
  show(at("delta"), `/api/images/${shown.id}/delta/${chosen}/${at("other").value}.png`);
}

function show(image, address) {
  const frame = image.parentElement;
  frame.classList.add("loading");
  image.onload = () => frame.classList.remove("loading");
  image.onerror = async () => {
    const told = await ask(address).then(
      () => "A picture could not be shown.",
      (error) => error.message,
    );
    if (image.getAttribute("src") === address) complain(told);
  };
  image.src = address;
}

// A pixel.

const inside = (pixel, size) => Math.min(Math.max(pixel, 0), size - 1);

function pixelAt(event) {
  const box = event.currentTarget.querySelector("img").getBoundingClientRect();
  const column = Math.floor(((event.clientX - box.left) / box.width) * model.width);
  const row = Math.floor(((event.clientY - box.top) / box.height) * model.height);
  return [inside(column, model.width), inside(row, model.height)];
}

function pointAt(pixel) {
  pointed = pixel;
  for (const frame of frames) {
    const cross =
      frame.querySelector(".cross") ?? frame.appendChild(element("div", "", { class: "cross" }));
    cross.style.left = `${(100 * (pixel[0] + 0.5)) / model.width}%`;
    cross.style.top = `${(100 * (pixel[1] + 0.5)) / model.height}%`;
  }
  readPixel();
}

function readPixel() {
  if (!pointed) return;
  const [column, row] = pointed;
  const value = values?.[row * model.width + column];
  at("pixel").textContent =
    value === undefined
      ? "…"
      : `Pixel (${column}, ${row}) contributes ${value < 0 ? "−" : "+"}` +
        `${Math.abs(value).toExponential(2)} to “${names[chosen]}”.`;
}

function leave() {
  pointed = null;
  document.querySelectorAll(".cross").forEach((cross) => cross.remove());
  at("pixel").textContent = "Point at a pixel to read its contribution.";
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function move(event) {
  const [column, row] = pointed ?? [model.width >> 1, model.height >> 1];
  if (event.key in ARROWS) {
    const [x, y] = ARROWS[event.key].map((step) => step * (event.shiftKey ? 10 : 1));
    pointAt([inside(column + x, model.width), inside(row + y, model.height)]);
  } else if (event.key === "Enter" || event.key === " ") {
    pointAt([column, row]);
    place = pointed;
    showUnits();
  } else return;
  event.preventDefault();
}

// Units.

const showUnits = task("The network looks for units …", async (current) => {
  if (!place || !model.layers.length) return;
  const layer = at("layer").value;
  const base = `/api/images/${shown.id}/layers/${encodeURIComponent(layer)}`;
  const [x, y] = [(place[0] + 0.5) / model.width, (place[1] + 0.5) / model.height];
  const found = await json(`${base}?x=${x}&y=${y}`);
  if (!current()) return;
  markPlace(found);
  const tiles = found.units.map(({ unit, value }) => {
    const tile = element("figure");
    const frame = element("div", "", { class: "picture" });
    const image = element("img", "", { alt: `What unit ${unit} of ${layer} responds to here` });
    frame.append(image);
    tile.append(frame, element("figcaption", `unit ${unit}: ${value.toPrecision(3)}`));
    show(image, `${base}/${unit}/${found.row}/${found.column}.png`);
    return tile;
  });
  at("units").replaceChildren(...tiles);
});

function markPlace({ row, column, height, width }) {
  for (const frame of frames) {
    const mark =
      frame.querySelector(".place") ?? frame.appendChild(element("div", "", { class: "place" }));
    mark.style.left = `${(100 * column) / width}%`;
    mark.style.top = `${(100 * row) / height}%`;
    mark.style.width = `${100 / width}%`;
    mark.style.height = `${100 / height}%`;
  }
}

// The start.

const start = task("The page asks for the model …", async () => {
  model = await json("/api/model");
  const twice = new Set(model.classes.filter((name, i) => model.classes.indexOf(name) !== i));
  names = model.classes.map((name, i) => (twice.has(name) ? `${name} (${i})` : name));
  const size = `${model.width} × ${model.height} px`;
  const million = model.parameters >= 1e6;
  const count = million ? (model.parameters / 1e6).toFixed(1) : Math.ceil(model.parameters / 1e3);
  const parameters = `${count} ${million ? "million" : "thousand"} parameters`;
  at("model").textContent = `${model.name}: ${model.architecture}, ${parameters}, ${size}`;
  at("classes").replaceChildren(...names.map((name) => element("option", "", { value: name })));
  at("other").replaceChildren(...names.map((name, i) => element("option", name, { value: i })));
  at("compared").hidden = names.length < 2;
  at("layer").replaceChildren(...model.layers.map((name) => element("option", name, { value: name })));
  at("layer").selectedIndex = Math.floor((model.layers.length * 3) / 4);
  at("inner").hidden = !model.layers.length;
  document.body.style.setProperty("--shape", `${model.width} / ${model.height}`);
  const thumbnails = model.samples.map((name, i) => {
    const button = element("button", "", { type: "button", title: name });
    button.append(element("img", "", { src: `/api/samples/${i}.png`, alt: name }));
    button.onclick = () => openSample(i);
    return button;
  });
  at("samples").replaceChildren(...thumbnails);
  if (model.samples.length) openSample(0);
});

at("file").onchange = (event) => {
  if (event.target.files.length) openFile(event.target.files[0]);
  event.target.value = ""; // the same file can be chosen again
};
at("drop").ondragover = (event) => {
  event.preventDefault();
  at("drop").classList.add("over");
};
at("drop").ondragleave = () => at("drop").classList.remove("over");
document.ondragover = (event) => event.preventDefault();
document.ondrop = (event) => {
  event.preventDefault();
  at("drop").classList.remove("over");
  const [file] = event.dataTransfer.files;
  if (file) openFile(file);
  else complain("What was dropped is no file: save the image first, and drop the file.");
};
document.onpaste = (event) => {
  const [file] = event.clipboardData.files;
  if (file) openFile(file);
};
at("style").onchange = () => showColour();
at("other").onchange = () => showDelta();
at("layer").onchange = () => showUnits();
at("search").onchange = (event) => {
  const sought = event.target.value.trim();
  const index = names.findIndex((name) => name.trim() === sought);
  if (index >= 0) {
    explain(index);
    event.target.value = "";
  } else if (sought) {
    complain(`The model has no class “${sought}”: choose one of the list.`);
  }
};
for (const frame of frames) {
  frame.onmousemove = (event) => pointAt(pixelAt(event));
  frame.onmouseleave = leave;
  frame.onblur = leave;
  frame.onkeydown = move;
  frame.onclick = (event) => {
    place = pixelAt(event);
    showUnits();
  };
}
start();
