// The explorer's page. Pictures are addresses of the server; numbers come as JSON.

const at = (id) => document.getElementById(id);
const pictures = ["image", "colour", "map", "delta"].map(at);

let model;
let shown = null; // {id, name, predictions} of the image
let chosen = null; // index of the class that is explained
let values = null; // contributions of its pixels
let place = null; // [x, y] in 0..1 that units are asked for
let turn = 0; // grows with every image and class, so that late answers are known as such

function say(sentence, busy = false) {
  at("message").textContent = sentence;
  at("message").hidden = !sentence;
  at("message").classList.toggle("busy", busy);
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

function attempt(work) {
  return async (...given) => {
    try {
      await work(...given);
    } catch (error) {
      say(error.message);
    }
  };
}

function element(kind, content = "", attributes = {}) {
  const made = document.createElement(kind);
  made.textContent = content;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// The image.

const open = attempt(async (request) => {
  const mine = ++turn;
  say("The network looks at the image …", true);
  const found = await request();
  if (mine !== turn) return;
  say("");
  shown = found;
  place = null;
  at("waiting").hidden = true;
  at("searching").hidden = false;
  at("shown").hidden = false;
  at("imagename").textContent = found.name;
  show(at("image"), `/api/images/${found.id}.png`);
  at("units").replaceChildren();
  await explain(found.predictions[0].index, found.predictions[1]?.index ?? 0);
});

const openFile = (file) => {
  const form = new FormData();
  form.append("file", file, file.name || "pasted image");
  return open(() => json("/api/images", { method: "POST", body: form }));
};

const openSample = (index) => open(() => json(`/api/samples/${index}`, { method: "POST" }));

// A class.

const explain = attempt(async (index, other = Number(at("other").value)) => {
  const mine = ++turn;
  chosen = index;
  values = null;
  at("other").value = other;
  listPredictions();
  at("title").textContent = `Why “${model.classes[index]}”?`;
  at("sum").textContent = "…";
  const base = `/api/images/${shown.id}/classes/${index}`;
  showColour();
  show(at("map"), `${base}/map.png`);
  showDelta();
  const numbers = await json(base);
  const bytes = await (await ask(`${base}/contributions`)).arrayBuffer();
  if (mine !== turn) return;
  values = new Float32Array(bytes);
  if (!shown.predictions.some((p) => p.index === index)) shown.predictions.push(numbers);
  listPredictions();
  at("sum").textContent =
    `Contributions ${signed(numbers.sum)} and bias ${signed(numbers.bias)} make the logit ` +
    `${signed(numbers.logit)}, ` +
    `probability ${percent(numbers.probability)}; W(x) misses the logit by ` +
    `${Math.abs(numbers.residual).toExponential(1)}.`;
});

function listPredictions() {
  const rows = shown.predictions.map((p) => {
    const button = element("button", "", { type: "button", "aria-pressed": p.index === chosen });
    const bar = element("span", "", { class: "bar" });
    bar.append(element("i", "", { style: `width: ${100 * p.probability}%` }));
    button.append(element("span", p.name), element("span", percent(p.probability)), bar);
    button.onclick = () => explain(p.index);
    const row = element("li");
    row.append(button);
    return row;
  });
  at("predictions").replaceChildren(...rows);
}

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;
const percent = (share) => `${(100 * share).toFixed(share < 0.001 ? 3 : 1)} %`;

function showColour() {
  const style = at("style").value;
  show(at("colour"), `/api/images/${shown.id}/classes/${chosen}/colour.png?style=${style}`);
}

function showDelta() {
  show(at("delta"), `/api/images/${shown.id}/delta/${chosen}/${at("other").value}.png`);
}

function show(image, address) {
  const frame = image.parentElement;
  frame.classList.add("loading");
  image.onload = () => frame.classList.remove("loading");
  image.onerror = attempt(async () => {
    await ask(address); // for the sentence that says why
    throw new Error("A picture could not be shown.");
  });
  image.src = address;
}

// A pixel.

function point(event) {
  const box = event.currentTarget.getBoundingClientRect();
  const inside = (share) => Math.min(Math.max(share, 0), 1);
  return [inside((event.clientX - box.left) / box.width), inside((event.clientY - box.top) / box.height)];
}

function read(event) {
  const [x, y] = point(event);
  for (const image of pictures) {
    const frame = image.parentElement;
    const cross = frame.querySelector(".cross") ?? frame.appendChild(element("div", "", { class: "cross" }));
    cross.style.left = `${100 * x}%`;
    cross.style.top = `${100 * y}%`;
  }
  if (!values) return;
  const column = Math.min(Math.floor(x * model.width), model.width - 1);
  const row = Math.min(Math.floor(y * model.height), model.height - 1);
  const value = values[row * model.width + column];
  at("pixel").textContent =
    `Pixel (${column}, ${row}) contributes ${value < 0 ? "−" : "+"}${Math.abs(value).toExponential(2)} ` +
    `to “${model.classes[chosen]}”.`;
}

function leave() {
  document.querySelectorAll(".cross").forEach((cross) => cross.remove());
  at("pixel").textContent = "Point at a pixel to read its contribution.";
}

// Units.

const showUnits = attempt(async () => {
  if (!place || !model.layers.length) return;
  const layer = at("layer").value;
  const base = `/api/images/${shown.id}/layers/${encodeURIComponent(layer)}`;
  const found = await json(`${base}?x=${place[0]}&y=${place[1]}`);
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
  for (const image of pictures) {
    const frame = image.parentElement;
    const mark = frame.querySelector(".place") ?? frame.appendChild(element("div", "", { class: "place" }));
    mark.style.left = `${(100 * column) / width}%`;
    mark.style.top = `${(100 * row) / height}%`;
    mark.style.width = `${100 / width}%`;
    mark.style.height = `${100 / height}%`;
  }
}

// The start.

const start = attempt(async () => {
  model = await json("/api/model");
  const size = `${model.width} × ${model.height} px`;
  const parameters = `${(model.parameters / 1e6).toFixed(1)} million parameters`;
  at("model").textContent = `${model.name}: ${model.architecture}, ${parameters}, ${size}`;
  at("classes").replaceChildren(...model.classes.map((name) => element("option", "", { value: name })));
  at("other").replaceChildren(...model.classes.map((name, i) => element("option", name, { value: i })));
  at("layer").replaceChildren(...model.layers.map((name) => element("option", name, { value: name })));
  at("layer").selectedIndex = Math.floor((model.layers.length * 3) / 4);
  at("inner").hidden = !model.layers.length;
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
  if (event.dataTransfer.files.length) openFile(event.dataTransfer.files[0]);
};
document.onpaste = (event) => {
  const [file] = event.clipboardData.files;
  if (file) openFile(file);
};
at("style").onchange = () => showColour();
at("other").onchange = () => showDelta();
at("layer").onchange = () => showUnits();
at("search").onchange = (event) => {
  const index = model.classes.indexOf(event.target.value.trim());
  if (index >= 0) {
    say("");
    explain(index);
    event.target.value = "";
  } else if (event.target.value) {
    say(`The model has no class “${event.target.value}”: choose one of the list.`);
  }
};
for (const image of pictures) {
  const frame = image.parentElement;
  frame.onmousemove = read;
  frame.onmouseleave = leave;
  frame.onclick = (event) => {
    place = point(event);
    showUnits();
  };
}
start();
