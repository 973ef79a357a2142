"""The explorer: its answers against the library's own, and the page in a browser."""

import io
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which

import numpy as np
import pytest
import torch
import uvicorn
from fastapi.testclient import TestClient
from PIL import Image

import torchbcos as tb
from cases import caller
from torchbcos import data, neurons, render
from torchbcos.encoding import encode
from torchbcos.images import read_image
from torchbcos.tap import tap
from torchbcos.web import explorer as explorer_module
from torchbcos.web.app import create_app
from torchbcos.web.explorer import Explorer

PHOTOS = Path(__file__).parent.parent / "examples" / "photos"
CLASSES = ("red", "green", "a <b>bold</b> one", "blue")
LAYER = "6"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = tb.create_model("mini", classes=CLASSES, width=8)
    tb.calibrate(model, torch.rand(8, 3, 48, 48))
    return model.eval()


@pytest.fixture
def explorer(model):
    samples = (PHOTOS / "cat.jpg", PHOTOS / "church.jpg")
    return Explorer(model, "mini.safetensors", samples)


@pytest.fixture
def client(explorer):
    return TestClient(create_app(explorer), base_url="http://localhost")


@pytest.fixture
def cat():
    return read_image(PHOTOS / "cat.jpg", (48, 48))[None]


def opened(client, index=0):
    return client.post(f"/api/samples/{index}").json()["id"]


def picture(client, address):
    answer = client.get(address)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["cache-control"] == "no-store"  # another model may answer later
    return np.array(Image.open(io.BytesIO(answer.content)))


def test_the_model_is_described(client, model):
    about = client.get("/api/model").json()
    assert about["name"] == "mini.safetensors"
    assert about["classes"] == list(CLASSES)
    assert (about["height"], about["width"]) == (48, 48)
    assert about["parameters"] == sum(p.numel() for p in model.parameters())
    assert LAYER in about["layers"]
    assert about["samples"] == ["cat.jpg", "church.jpg"]


def test_predictions_are_the_models_own(client, model, cat):
    found = client.post("/api/samples/0").json()
    logits = model(cat)[0]
    order = logits.argsort(descending=True).tolist()
    assert [p["index"] for p in found["predictions"]] == order
    assert [p["name"] for p in found["predictions"]] == [CLASSES[k] for k in order]
    assert [p["logit"] for p in found["predictions"]] == pytest.approx(logits[order].tolist())
    expected = logits.sigmoid()[order].tolist()
    assert [p["probability"] for p in found["predictions"]] == pytest.approx(expected)


def test_an_image_that_is_sent_is_the_sample_of_the_same_content(client, cat):
    content = (PHOTOS / "cat.jpg").read_bytes()
    sent = client.post("/api/images", files={"file": ("my cat.jpg", content)}).json()
    assert sent["name"] == "my cat.jpg"
    assert sent["id"] == opened(client)
    shown = picture(client, f"/api/images/{sent['id']}.png")
    assert np.array_equal(shown, (cat[0] * 255).round().byte().permute(1, 2, 0).numpy())
    assert picture(client, "/api/samples/1.png").shape == (96, 96, 3)


@pytest.mark.parametrize("index", range(4))
def test_pictures_and_numbers_of_a_class_are_those_of_explain(client, model, cat, index):
    e = tb.explain(model, cat, targets=[index])
    base = f"/api/images/{opened(client)}/classes/{index}"
    for style in ("paper", "released"):
        expected = render.colour(e, style=style)[0, 0]
        assert np.array_equal(picture(client, f"{base}/colour.png?style={style}"), expected)
    assert np.array_equal(picture(client, f"{base}/map.png"), render.contributions(e)[0, 0])
    values = np.frombuffer(client.get(f"{base}/contributions").content, np.float32)
    assert np.array_equal(values.reshape(48, 48), e.contributions[0, 0].numpy())
    numbers = client.get(base).json()
    assert numbers["sum"] + numbers["bias"] == pytest.approx(numbers["logit"], abs=1e-4)
    assert numbers["residual"] == e.residual.item()


def test_the_difference_of_two_classes(client, model, cat):
    e = tb.explain(model, cat, targets=[3, 1])
    found = picture(client, f"/api/images/{opened(client)}/delta/3/1.png")
    assert np.array_equal(found, render.delta(e)[0])


def test_units_are_those_that_respond_most_to_the_place(client, model, cat):
    key = opened(client)
    with torch.no_grad():
        activation = tap(model.network, LAYER, encode(cat))[0]
    _, height, width = activation.shape
    for x, y in ((0, 0), (0.5, 0.26), (1, 1)):
        found = client.get(f"/api/images/{key}/layers/{LAYER}", params={"x": x, "y": y}).json()
        row, column = min(int(y * height), height - 1), min(int(x * width), width - 1)
        assert (found["row"], found["column"]) == (row, column)
        best = activation[:, row, column].topk(6)
        assert [u["unit"] for u in found["units"]] == best.indices.tolist()
        assert [u["value"] for u in found["units"]] == pytest.approx(best.values.tolist())
    unit = found["units"][0]["unit"]
    e = tb.explain(model, cat, layer=LAYER, unit=(unit, row, column))
    shown = picture(client, f"/api/images/{key}/layers/{LAYER}/{unit}/{row}/{column}.png")
    assert np.array_equal(shown, render.colour(e)[0, 0])


WRONG = {
    "/api/images/0123.png": (404, "not in memory any more: open it again"),
    "/api/images/{id}/classes/4": (404, "there is no class 4: the model has 4."),
    "/api/images/{id}/classes/-1/map.png": (404, "there is no class -1"),
    "/api/images/{id}/classes/x": (422, "`index`: "),
    "/api/images/{id}/classes/0/colour.png?style=oil": (404, "`style` (='oil') must be 'paper'"),
    "/api/images/{id}/layers/nothing?x=0&y=0": (404, "`layer` (='nothing') is no layer"),
    "/api/images/{id}/layers/6?x=2&y=0": (404, "the place (2, 0) must be in 0..1"),
    "/api/images/{id}/layers/6?x=nan&y=0": (404, "must be in 0..1"),
    "/api/images/{id}/layers/6": (422, "`x`: Field required."),
    "/api/images/{id}/layers/6/99/0/0.png": (404, "there is no unit 99 at (0, 0): 6 has "),
    "/api/samples/2.png": (404, "there is no sample 2: there are 2."),
    "/api/nothing": (404, "Not Found."),
}


@pytest.mark.parametrize("address", WRONG)
def test_what_is_not_there_is_told_in_a_sentence(client, address):
    code, sentence = WRONG[address]
    answer = client.get(address.replace("{id}", opened(client)))
    assert answer.status_code == code
    assert sentence in answer.json()["error"]


def test_files_that_are_no_images_are_refused_by_name(client, monkeypatch):
    def told(content):
        answer = client.post("/api/images", files={"file": ("notes.txt", content)})
        assert answer.status_code == 422
        return answer.json()["error"]

    assert told(b"hello") == "notes.txt is no image that Pillow can read."
    cut = (PHOTOS / "cat.jpg").read_bytes()[:2000]
    assert told(cut).startswith("notes.txt is damaged and cannot be decoded")
    monkeypatch.setattr("torchbcos.web.app.LIMIT", 1 << 20)
    assert told(bytes(2 << 20)) == "notes.txt is too large: reduce it to less than 1 MiB."
    assert client.post("/api/images").json()["error"] == "`file`: Field required."


def test_only_browsers_that_call_it_by_its_name_are_answered(explorer):
    stranger = TestClient(create_app(explorer), base_url="http://evil.example")
    assert stranger.get("/api/model").status_code == 400
    assert stranger.get("/api/model").json() == {"error": "The page is not served under this name."}
    for name in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
        known = TestClient(create_app(explorer), base_url=f"http://{name}")
        assert known.get("/api/model").status_code == 200
    broken = TestClient(create_app(explorer), base_url="http://localhost")
    assert broken.get("/api/model", headers={"host": "[::1"}).status_code == 400
    anyone = TestClient(create_app(explorer, ("*",)), base_url="http://evil.example")
    assert anyone.get("/api/model").status_code == 200


def test_memory_is_bounded(explorer, monkeypatch):
    monkeypatch.setattr(explorer_module, "IMAGES", 2)
    monkeypatch.setattr(explorer_module, "RESULTS", 3)
    colours = [Image.new("RGB", (48, 48), c) for c in ("red", "green", "blue")]
    keys = []
    for image in colours:
        file = io.BytesIO()
        image.save(file, "PNG")
        keys.append(explorer.add(file.getvalue(), "x.png")["id"])
    with pytest.raises(explorer_module.NotThereError, match="open it again"):
        explorer.colour(keys[0], 0, "paper")
    before = explorer.map(keys[2], 0)
    for index in range(4):
        explorer.map(keys[2], index)
    assert len(explorer._results) == 3
    assert explorer.map(keys[2], 0) == before


def test_many_may_ask_at_once(client):
    keys = [opened(client, i) for i in (0, 1)]
    addresses = [f"/api/images/{k}/classes/{c}/colour.png" for k in keys for c in range(4)]
    fresh = [client.get(a).content for a in addresses]
    with ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda a: client.get(a).content, addresses * 3))
    assert again == fresh * 3
    assert len(set(fresh)) == 8


def test_a_conventional_model_is_refused():
    network = tb.create_model("conventional/mini", num_classes=2)
    with pytest.raises(ValueError, match="is conventional, and has no W"):
        Explorer(network, "mini")


# The command.


def test_bad_arguments_end_with_a_sentence(monkeypatch, capsys, tmp_path):
    call = caller(monkeypatch, capsys, "serve")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, complaint = call("--model", "cifar10", "--port", port)
    assert code == 2
    assert f"`--port` (={port}) of 127.0.0.1 cannot be used" in complaint
    code, _, complaint = call("--host", "999.1.1.1", "--port", 0, "--model", "cifar10")
    assert code == 2
    assert "`--host` (='999.1.1.1') must be an address of this machine." in complaint
    (tmp_path / "notes.jpg").write_text("hello")
    code, _, complaint = call(tmp_path / "notes.jpg")
    assert (code, "is no image that Pillow can read" in complaint) == (2, True)
    monkeypatch.setattr("torchbcos.cli_serve.OFFERED", 1)
    code, _, complaint = call(PHOTOS, "--host", "999.1.1.1", "--model", "cifar10")
    assert "Only the first 1 of 2 images are offered" in complaint
    monkeypatch.setattr("torchbcos.cli_serve.find_spec", lambda name: None)
    code, _, complaint = call()
    assert code == 2
    assert "needs the package fastapi: install it with pip install 'torchbcos[web]'" in complaint


def test_the_command_answers_until_it_is_interrupted():
    command = [sys.executable, "-m", "torchbcos", "serve", str(PHOTOS), "--model", "cifar10"]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline()
            address = line.split()[1]
            assert address.startswith("http://127.0.0.1:")
            import httpx

            assert httpx.get(f"{address}/api/model", timeout=60).json()["name"] == "cifar10"
            assert "<title>torchbcos explorer</title>" in httpx.get(address, timeout=60).text
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0


# The page.


@pytest.fixture
def address(explorer):
    server = uvicorn.Server(uvicorn.Config(create_app(explorer), port=0, log_level="warning"))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture
def browser():
    browser_file = which("chromium") or which("chromium-browser") or which("google-chrome")
    if browser_file is None:
        pytest.skip("no browser: install chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_file, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, address):
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.set_default_timeout(60_000)
    page.troubles = []
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.goto(address)
    return page


def settle(page):
    page.wait_for_function("document.querySelectorAll('.loading').length === 0")


def test_the_page_explores_a_sample(page, explorer):
    page.wait_for_selector("#sum:has-text('logit')")
    settle(page)
    names = page.locator("#predictions button span:first-child").all_inner_texts()
    key = next(iter(explorer._images))
    best = explorer._images[key].logits.argsort(descending=True).tolist()
    assert names == [CLASSES[k] for k in best]  # words are shown, not read as HTML
    assert page.inner_text("#title") == f"Why “{CLASSES[best[0]]}”?"
    assert all(page.evaluate("[...document.images].map((i) => i.naturalWidth > 0)"))

    page.locator("#predictions button").nth(1).click()
    page.wait_for_selector(f"#title:has-text('{CLASSES[best[1]].split()[0]}')")
    page.wait_for_function("document.getElementById('sum').textContent.includes('logit')")
    assert f"/classes/{best[1]}/" in page.get_attribute("#colour", "src")
    page.select_option("#other", str(best[2]))
    assert page.get_attribute("#delta", "src").endswith(f"/delta/{best[1]}/{best[2]}.png")
    page.select_option("#style", "released")
    assert page.get_attribute("#colour", "src").endswith("style=released")
    settle(page)

    box = page.locator("#map").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.51, box["y"] + box["height"] * 0.26)
    e = explorer._explanation(key, best[1])
    value = e.contributions[0, 0, 12, 24].item()
    told = page.inner_text("#pixel")
    assert told.startswith("Pixel (24, 12) contributes " + ("−" if value < 0 else "+"))
    assert float(told.split()[4].replace("−", "-")) == pytest.approx(value, rel=0.01)

    page.select_option("#layer", LAYER)
    page.mouse.click(box["x"] + box["width"] * 0.51, box["y"] + box["height"] * 0.26)
    page.wait_for_selector("#units figure")
    settle(page)
    expected = explorer.units(key, LAYER, 0.51, 0.26)["units"]
    shown = page.locator("#units figcaption").all_inner_texts()
    assert [t.split(":")[0] for t in shown] == [f"unit {u['unit']}" for u in expected]
    assert page.troubles == []


def test_the_page_takes_files_and_says_what_is_wrong_with_them(page, tmp_path):
    page.wait_for_selector("#sum:has-text('logit')")
    (tmp_path / "notes.txt").write_text("hello")
    page.set_input_files("#file", tmp_path / "notes.txt")
    page.wait_for_selector("#message:has-text('notes.txt is no image that Pillow can read.')")
    assert page.inner_text("#imagename") == "cat.jpg"  # what was shown stays

    page.set_input_files("#file", PHOTOS / "church.jpg")
    page.wait_for_selector("#imagename:has-text('church.jpg')")
    page.wait_for_selector("#message", state="hidden")
    page.fill("#search", "purple")
    page.keyboard.press("Enter")
    page.wait_for_selector("#message:has-text('The model has no class “purple”')")
    page.fill("#search", "blue")
    page.keyboard.press("Enter")
    page.wait_for_selector("#title:has-text('blue')")
    settle(page)
    assert page.troubles == []


def ready(page):
    page.wait_for_function("document.getElementById('sum').textContent.includes('logit')")
    page.wait_for_selector("#message", state="hidden")
    settle(page)


def held(page, pattern):
    """Requests for `pattern`, which wait until the test lets them go on."""
    routes = []
    page.route(pattern, lambda route: routes.append(route))
    return routes


def until(page, condition):
    for _ in range(600):
        if condition():
            return
        page.wait_for_timeout(50)
    raise AssertionError("it did not come to that")


def test_every_position_reads_the_pixel_under_it(page):
    ready(page)
    box = page.locator("#map").bounding_box()
    for x in range(int(box["x"]) + 1, int(box["x"] + box["width"])):
        page.mouse.move(x, box["y"] + 40)
        column = int((x - box["x"]) / box["width"] * 48)
        assert page.inner_text("#pixel").startswith(f"Pixel ({column}, ")


def test_a_class_is_compared_with_another_one(page):
    ready(page)
    for row in (1, 2, 1, 0, 3):
        page.locator("#predictions button").nth(row).click()
        first, second = page.get_attribute("#delta", "src").split("/delta/")[1][:-4].split("/")
        assert first != second == page.input_value("#other")
        assert page.locator(f"#other option[value='{first}']").is_disabled()


def test_a_class_that_is_chosen_while_an_image_is_read_does_not_stop_it(page):
    ready(page)
    waiting = held(page, "**/api/images")
    page.set_input_files("#file", PHOTOS / "church.jpg")
    until(page, lambda: waiting)
    page.locator("#predictions button").nth(1).click()
    page.wait_for_function("document.getElementById('sum').textContent.includes('logit')")
    assert "looks at the image" in page.inner_text("#message")
    waiting[0].continue_()
    page.wait_for_selector("#imagename:has-text('church.jpg')")
    ready(page)
    assert page.troubles == []


def test_a_file_that_is_no_image_does_not_stop_the_explanation(page, tmp_path):
    ready(page)
    (tmp_path / "notes.txt").write_text("hello")
    waiting = held(page, "**/contributions")
    page.locator("#predictions button").nth(1).click()
    until(page, lambda: waiting)
    page.set_input_files("#file", tmp_path / "notes.txt")
    page.wait_for_selector("#message:has-text('notes.txt is no image')")
    assert page.text_content("#sum") == "…"
    waiting[0].continue_()
    page.wait_for_function("document.getElementById('sum').textContent.includes('logit')")
    assert page.troubles == []


def test_units_of_another_image_or_place_are_not_shown(page, explorer):
    ready(page)
    page.select_option("#layer", LAYER)
    waiting = held(page, f"**/layers/{LAYER}?*")
    page.locator("#map").click(position={"x": 10, "y": 10})
    until(page, lambda: len(waiting) == 1)
    page.locator("#map").click(position={"x": 90, "y": 90})
    until(page, lambda: len(waiting) == 2)
    waiting[1].continue_()
    page.wait_for_selector("#units figure")
    left = page.evaluate("document.querySelector('.place').style.left")
    waiting[0].continue_()
    page.wait_for_timeout(300)
    assert page.evaluate("document.querySelector('.place').style.left") == left

    page.locator("#map").click(position={"x": 10, "y": 10})
    until(page, lambda: len(waiting) == 3)
    page.locator("#samples button").nth(1).click()
    page.wait_for_selector("#imagename:has-text('church.jpg')")
    waiting[2].continue_()
    ready(page)
    page.wait_for_timeout(300)
    assert page.locator("#units figure, .place").count() == 0
    assert page.troubles == []


def test_a_complaint_goes_when_what_was_asked_next_succeeds(page):
    ready(page)
    page.route("**/classes/**", lambda route: route.abort())
    page.locator("#predictions button").nth(1).click()
    page.wait_for_selector("#message:has-text('The server does not answer')")
    page.wait_for_function("document.getElementById('sum').textContent === ''")
    page.unroute("**/classes/**")
    page.locator("#predictions button").nth(2).click()
    ready(page)  # which the complaint would prevent
    assert page.troubles == []


def test_pixels_units_and_classes_by_keyboard(page, explorer):
    ready(page)
    page.select_option("#layer", LAYER)
    page.locator("#map").locator("..").focus()
    for key in ("ArrowRight", "ArrowDown", "Shift+ArrowLeft"):
        page.keyboard.press(key)
    assert page.inner_text("#pixel").startswith("Pixel (15, 25) contributes")
    page.keyboard.press("Enter")
    page.wait_for_selector("#units figure")
    page.locator("#predictions button").nth(2).focus()
    page.keyboard.press("Enter")
    ready(page)
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"


@pytest.mark.parametrize("width", [320, 640])
def test_no_page_is_wider_than_a_phone(page, width, monkeypatch, explorer):
    name = "a-name-without-any-space-" * 9
    monkeypatch.setattr(explorer, "name", name)
    page.set_viewport_size({"width": width, "height": 700})
    page.reload()
    page.wait_for_selector(f"#model:has-text('{name}')")
    ready(page)
    page.fill("#search", name)
    page.keyboard.press("Enter")
    page.wait_for_selector("#message:has-text('no class')")
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_classes_of_one_name_are_told_apart(page, explorer, monkeypatch):
    monkeypatch.setattr(explorer.model, "classes", ("crane", " crane ", "crane", "blue"))
    page.reload()
    ready(page)
    page.fill("#search", "crane (2)")
    page.keyboard.press("Enter")
    ready(page)
    assert "/classes/2/" in page.get_attribute("#colour", "src")


def test_the_page_without_samples_invites(model):
    bare = Explorer(model, "mini")
    client = TestClient(create_app(bare), base_url="http://localhost")
    assert client.get("/api/model").json()["samples"] == []
    assert "Drop an image here" in client.get("/").text


def test_sheets_of_units_are_drawn_before_they_are_printed(browser, model, tmp_path):
    made = data.shapes(12, size=48)
    images = data.Images((made.images * 255).byte(), made.labels % len(CLASSES))
    found = neurons.collect(model, images, tmp_path / "n", top=4, layers=["3"])
    units = [("3", unit) for unit in range(8)]
    drawn = neurons.sheets(model, images, found, units, first=2, rest=2)
    (tmp_path / "page.html").write_text(neurons.build_page("8", found, images, drawn), "utf-8")
    page = browser.new_page(viewport={"width": 800, "height": 400})
    page.goto((tmp_path / "page.html").as_uri())
    assert page.locator(".sights").count() < 8  # those far below wait
    page.fill("#find", "unit 7")
    assert page.inner_text("#count") == "1 unit"
    page.fill("#find", "")
    page.pdf()
    assert page.locator(".sights").count() == 8
