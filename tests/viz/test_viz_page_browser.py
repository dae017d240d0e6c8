"""The interactive page in headless Chromium: what opens, what is found, what fits."""

import functools
import random
import re

import gallery
import jax
import lab
import pytest
import viz_models as m
from test_viz_page import drawn, hostile

from jaxpar import viz
from jaxpar.viz._draw.table import to_html

pytestmark = pytest.mark.slow

# Boxes that cover each other, or that are outside of the frame of their block.
COLLISIONS = """
() => {
  const boxes = [...svg.querySelectorAll('.box > rect, .box > ellipse')].map(e => e.getBoundingClientRect())
  const frames = [...svg.querySelectorAll('.frame > rect')].map(e => e.getBoundingClientRect())
  const next = (a, b) => a.right <= b.left + 1 || a.bottom <= b.top + 1
  const apart = (a, b) => next(a, b) || next(b, a)
  const within = (a, b) => a.left >= b.left - 1 && a.top >= b.top - 1
  const inside = (a, b) => within(a, b) && a.right <= b.right + 1 && a.bottom <= b.bottom + 1
  const found = []
  boxes.forEach((a, at) => boxes.slice(at + 1).forEach(b => apart(a, b) || found.push(['boxes', a, b])))
  for (const frame of frames) {
    for (const box of boxes) apart(box, frame) || inside(box, frame) || found.push(['cut', box, frame])
    for (const other of frames)
      apart(other, frame) || inside(other, frame) || inside(frame, other) || found.push(['frames', frame])
  }
  const all = svg.getBoundingClientRect()
  for (const box of boxes) inside(box, all) || found.push(['outside', box])
  return found.map(each => JSON.stringify(each))
}
"""

# Ends of lines that are not on the border of their box, with the distance.
LOOSE = """
() => {
  const placed = place(net, net.root, page.open, page.flipped), found = []
  const look = placed => {
    const block = net.blocks[placed.item - net.root]
    block.lines.forEach((line, at) => {
      const { spline } = placed.lines[at]
      for (const [item, [x, y]] of [[line.tail, spline[0]], [line.head, spline[spline.length - 1]]]) {
        const box = item < 0 ? { x: 0, y: 0, w: placed.w, h: placed.h } : placed.boxes.get(item)
        const [dx, dy] = [Math.abs(x - box.x - box.w / 2) - box.w / 2, Math.abs(y - box.y - box.h / 2) - box.h / 2]
        const oval = item >= 0 && item < net.root && net.nodes[item].oval
        const off = dx > 0 || dy > 0 ? Math.hypot(Math.max(dx, 0), Math.max(dy, 0)) : Math.min(-dx, -dy)
        if (off > (oval ? box.h / 2 + box.w / 2 : 2)) found.push([line, off])
      }
    })
    for (const inner of placed.inner.values()) look(inner)
  }
  look(placed)
  return found
}
"""
OVERFLOW = "document.documentElement.scrollWidth - innerWidth"
CUT = """() => [...document.querySelectorAll('header *, footer *, aside:not([hidden]) *')]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""


@functools.cache
def plotted(name, **options):
    return drawn(name, repeats=name != "nested", **options).html()


@pytest.fixture(scope="module")
def chrome():
    lab.needs()
    with lab.browser() as page:
        yield page.context.browser


@pytest.fixture
def show(chrome):
    """Opens a page and fails at the end where its script had an error or it loaded anything."""
    pages, wrong = [], []

    def opened(html, width=1280, height=900, **options):
        page = chrome.new_page(viewport={"width": width, "height": height}, **options)
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
        page.on("request", lambda request: wrong.append(request.url))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        page.set_content(html)
        page.locator("iframe, .box, svg, [role=table]").first.wait_for(state="attached")
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert wrong == []


def boxes(page):
    return page.locator("#svg .box").count()


def box(page, text):
    return page.locator("#svg .box", has_text=text).first


@pytest.mark.parametrize("direction", ["up", "down", "right"])
def test_any_set_of_open_blocks_is_drawn_without_overlap(show, direction):
    for name in ("nested", "resnet", "transformer gradient"):
        page = show(plotted(name, direction=direction))
        every = page.evaluate("allBlocks(net)")
        draw = random.Random(0)
        sets = [[], every, *([block for block in every if draw.random() < 0.5] for _ in range(8))]
        for some in sets:
            page.evaluate("some => show(new Set(some))", some)
            assert page.evaluate(COLLISIONS) == []
            assert page.evaluate(LOOSE) == []
        page.locator("#flip").click()
        assert page.evaluate(COLLISIONS) == page.evaluate(LOOSE) == []


def test_clicks_and_keys_open_and_close_blocks(show):
    page = show(plotted("nested"))
    page.select_option("#level", "0")
    before = boxes(page)
    box(page, "stage0").click()
    assert boxes(page) > before
    bar = page.locator("#svg .bar", has_text="stage0")
    assert bar.get_attribute("aria-expanded") == "true"
    assert box(page, "bottleneck").get_attribute("aria-label").startswith("Open bottleneck, ")
    bar.click()
    assert boxes(page) == before
    box(page, "stage1").focus()
    page.keyboard.press("Enter")
    opened = boxes(page)
    assert opened > before
    assert page.evaluate("document.activeElement.classList.contains('bar')")  # the focus stays with the block
    page.keyboard.press("Space")
    assert boxes(page) == before
    page.select_option("#level", "all")
    assert boxes(page) > opened
    assert page.locator("#svg .frame").count() == 6
    page.select_option("#level", "1")
    assert page.locator("#svg .frame").count() == 2
    page.evaluate("zoom(3)")
    for top in (0, 400, 900):  # the title of a block that is higher than the view stays in sight
        page.evaluate("top => { view.scrollTop = top }", top)
        page.wait_for_timeout(50)
        assert page.evaluate("[...svg.querySelectorAll('.bar')].some(bar => bar.getBoundingClientRect().top >= 30)")


def test_search_opens_what_it_finds_and_closes_it_again(show):
    page = show(plotted("nested"))
    page.select_option("#level", "0")
    before = boxes(page)
    page.keyboard.press("/")
    page.keyboard.type("Tanh")
    assert page.locator("#count").inner_text().startswith("1/")
    found = page.locator("#svg .box.found")
    assert found.count() == sum("anh" in text for text in found.all_text_contents()) > 3
    assert page.locator("#svg .box.current").count() == 1
    page.keyboard.press("Enter")
    assert page.locator("#count").inner_text().startswith("2/")
    page.locator("#search").fill("no such layer")
    assert page.locator("#count").inner_text() == "0/0"
    page.keyboard.press("Escape")
    assert boxes(page) == before
    assert page.locator("#svg .found").count() == 0


def test_the_path_of_a_layer_is_marked(show):
    page = show(plotted("gradient"))
    box(page, "FullyConnected").hover()
    lit, every = page.locator("#svg .box.lit").count(), boxes(page)
    assert 2 < lit < every
    assert page.locator("#svg .line.lit").count() > 2
    page.mouse.move(5, 5)
    assert page.locator("#svg.tracing").count() == 0


def test_a_click_tells_everything_of_a_layer(show):
    page = show(plotted("lenet"))
    box(page, "3x3/1, 20").click()
    text = page.locator("#panel").inner_text()
    assert "200 parameters" in text
    assert "lenet.py:" in text
    assert page.locator("#source a").count() == 0  # only the file's name is known
    page.locator("#copy").click()
    page.keyboard.press("Escape")
    assert page.locator("#panel").is_hidden()
    page.evaluate("net.nodes[0].source = '/home/a b/net.py:12 in f'; tell(0)")
    assert page.locator("#source a").get_attribute("href") == "vscode://file/home/a%20b/net.py:12"


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["lenet", "resnet", "transformer gradient"])
def test_nothing_overflows(show, name, width):
    page = show(plotted(name), width=width, height=700)
    for levels in ("start", "all"):
        if page.locator("#level").is_visible():
            page.select_option("#level", levels)
        box(page, "FullyConnected").click()
        assert page.evaluate(OVERFLOW) <= 0
        assert page.evaluate(CUT) == []
        page.keyboard.press("Escape")
    page.locator("#fit").click()
    inside = page.evaluate("svg.getBoundingClientRect().height <= view.clientHeight + 1")
    assert inside or page.evaluate("page.scale") == 0.04


def test_the_first_view_is_one_screen(show):
    for name in ("lenet", "gradient", "resnet", "nested", "transformer gradient"):
        page = show(plotted(name))
        assert page.evaluate("view.scrollWidth <= view.clientWidth && view.scrollHeight <= view.clientHeight")
        assert page.evaluate("page.scale") >= 0.6
        assert 3 <= boxes(page) <= 60


def test_a_small_view_has_less_open(show):
    opened = []
    for width, height in ((1280, 900), (900, 600), (390, 600)):
        page = show(plotted("flax"), width=width, height=height)
        opened.append(set(page.evaluate("[...page.open]")))
        assert page.evaluate("page.scale") >= 0.6
    assert opened[0] == set(page.evaluate("net.open"))
    assert opened[0] > opened[1] > opened[2] == set()
    assert boxes(show(plotted("nested", depth=2), width=390)) == boxes(show(plotted("nested", depth=2)))


def test_the_link_says_what_is_open(show, tmp_path):
    path = drawn("nested", repeats=False).save(str(tmp_path / "net.html"))
    page = show("<svg></svg>").context.browser.new_page()
    page.goto(f"file://{path}")
    page.select_option("#level", "0")
    box(page, "stage0").click()
    link, opened = page.url, boxes(page)
    assert re.fullmatch(r"file://.*/net\.html#open=\d+", link)
    page.reload()
    assert boxes(page) == opened
    page.select_option("#level", "start")
    assert page.url.endswith("net.html#")
    page.evaluate("link => { location.href = link }", link)
    page.wait_for_function("count => svg.querySelectorAll('.box').length === count", arg=opened)
    page.goto(f"file://{path}#open=0,999999,7")  # no blocks, or none that is there
    assert boxes(page) > 0
    page.close()


def test_arrow_keys_go_along_the_lines(show):
    """Up from a layer is what reads it, though another box is nearer to the straight line."""
    page = show(plotted("nested"))
    page.select_option("#level", "all")
    wrong = page.evaluate("""() => {
      const boxes = [...svg.querySelectorAll('.box')], wrong = []
      for (const from of boxes) {
        from.focus()
        go(from, 0, -1)
        const readers = new Set(net.readers[from.dataset.item])
        const shown = boxes.filter(box => readers.has(Number(box.dataset.item)))
        if (shown.length && !shown.includes(document.activeElement)) wrong.push(from.textContent)
      }
      return wrong
    }""")
    assert wrong == []


def test_a_closed_block_says_what_it_reads_and_what_reads_it(show):
    page = show(plotted("nested"))
    page.select_option("#level", "0")
    label = box(page, "stage0").get_attribute("aria-label")
    assert label == "Open stage0, 13 layers · 32 params, from x: input, to tanh5: Activation tanh, add2: add"
    label = box(page, "stage1").get_attribute("aria-label")
    assert label == "Open stage1, 13 layers, from relu1: Activation relu, to fullyconnected8: FullyConnected 4"


def test_arrow_keys_go_from_box_to_box(show):
    page = show(plotted("lenet"))
    assert page.locator("#svg [tabindex='0']").count() == 1  # one stop of the tab key
    focused = "document.activeElement.getAttribute('aria-label')"
    box(page, "conv1").focus()
    name = page.evaluate(focused)
    assert ", from images: input, to relu0" in name
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) == name
    assert page.locator("#svg [tabindex='0']").count() == 1


# Boxes from which an arrow key leaves the lines, though one goes that way, and boxes that do not say what they read.
STRAYING = """() => {
  const boxes = [...svg.querySelectorAll('.box')], found = []
  const nodes = box => nodesIn(net, Number(box.dataset.item))
  const middle = box => { const { top, height } = box.getBoundingClientRect(); return top + height / 2 }
  for (const from of boxes) {
    const joined = new Set(nodes(from).flatMap(node => [...net.sources[node], ...net.readers[node]]))
    for (const dy of [-1, 1]) {
      const isNext = box => (middle(box) - middle(from)) * dy > 1 && nodes(box).some(node => joined.has(node))
      const next = boxes.filter(box => box !== from && isNext(box))
      from.focus()
      go(from, 0, dy)
      if (next.length && !next.includes(document.activeElement)) found.push(['key', dy, from.textContent])
    }
    if (joined.size && !/, (from|to) /.test(from.getAttribute('aria-label'))) found.push(['label', from.textContent])
  }
  return found
}"""


# How many shapes beside lines cover another one.
COVERED = """
() => {
  const places = [...svg.querySelectorAll('text.shape')].map(text => text.getBoundingClientRect())
  const meet = (a, b) => a.left < b.right - 2 && b.left < a.right - 2 && a.top < b.bottom - 2 && b.top < a.bottom - 2
  return places.flatMap((a, at) => places.slice(at + 1).filter(b => meet(a, b))).length
}"""

# How many pairs of lines cross, each as 24 straight pieces.
CROSSINGS = """
() => {
  const lines = [...svg.querySelectorAll('.line path:not(.head)')].map(path =>
    Array.from({ length: 25 }, (_, at) => path.getPointAtLength(path.getTotalLength() * at / 24)))
  const side = (a, b, c) => (b.x - a.x) * (c.y - a.y) - (b.y - a.y) * (c.x - a.x)
  const meet = (a, b, c, d) => side(a, b, c) * side(a, b, d) < 0 && side(c, d, a) * side(c, d, b) < 0
  const pieces = line => line.slice(1).map((point, at) => [line[at], point])
  const cross = (one, other) => pieces(one).some(a => pieces(other).some(b => meet(...a, ...b)))
  return lines.flatMap((one, at) => lines.slice(at + 1).filter(other => cross(one, other))).length
}"""


@pytest.mark.parametrize("name", ["sharded_shard_map", "t5"])
def test_lines_do_not_cross_where_they_enter_an_open_block(show, name):
    """Each layout is made without the others, so a block has its inputs in another order. Then it is mirrored."""
    fn, args, options = gallery.make(name)
    with jax.numpy_rank_promotion("allow"):
        page = show(viz.plot_network(fn, *args, **options).html())
    assert page.evaluate(CROSSINGS) == 0
    page.evaluate("crosses = () => false; show(page.open)")  # as it was
    assert page.evaluate(CROSSINGS) > 0


@pytest.mark.parametrize("name", gallery.MODELS)
def test_a_page_of_the_gallery_can_be_read_by_everybody(show, name):
    """On a screen, on a phone, on paper, without scripts, and by the keyboard."""
    fn, args, options = gallery.make(name)
    with jax.numpy_rank_promotion("allow"):
        html = viz.plot_network(fn, *args, **options).html()
    page = show(html)
    assert page.evaluate("view.scrollWidth <= view.clientWidth && view.scrollHeight <= view.clientHeight")
    assert page.evaluate("page.scale") >= 0.6
    assert page.evaluate(COLLISIONS) == page.evaluate(LOOSE) == page.evaluate(STRAYING) == []
    assert page.evaluate(COVERED) == 0
    assert len(re.findall(rb"/Type /Page\b", page.pdf(format="A4"))) == 1
    page.evaluate("show(new Set(allBlocks(net)))")
    assert page.evaluate(COLLISIONS) == page.evaluate(LOOSE) == []
    phone = show(html, width=390, height=844)
    assert phone.evaluate("page.scale") >= 0.6
    assert phone.evaluate(OVERFLOW) <= 0
    still = show(html, width=390, java_script_enabled=False)
    shown = still.locator("#svg").bounding_box()
    assert 0 <= shown["x"] < shown["x"] + shown["width"] <= 390
    assert len(re.findall(rb"/Type /Page\b", still.pdf(format="A4"))) == 1
    if name in ("gpt2_loss", "vit"):  # twelve blocks
        assert len(html.encode()) <= 60_000


def test_print_has_the_whole_picture_on_one_page(show):
    page = show(plotted("resnet"))
    page.select_option("#level", "all")
    page.emulate_media(media="print")
    assert page.evaluate("svg.getBoundingClientRect().width <= innerWidth")
    assert page.evaluate("svg.getBoundingClientRect().height <= innerHeight")
    assert not page.locator(".tools").is_visible()


@pytest.mark.parametrize("kind", ["page", "diff"])
def test_a_dark_page_prints_dark_words_on_white_paper(show, kind):
    fn, args = m.network("lenet")
    html = plotted("lenet") if kind == "page" else viz.diff((fn, args), (fn, args)).html()
    page = show(html, color_scheme="dark")
    colours = """() => [...document.querySelectorAll('svg text, h1, p, th')].filter(e => e.textContent).map(
      e => getComputedStyle(e)[e.matches('text') ? 'fill' : 'color'])"""
    assert "rgb(230, 230, 230)" in page.evaluate(colours)
    page.emulate_media(media="print")
    assert all(int(red) < 128 for colour in page.evaluate(colours) for red in re.findall(r"rgb\((\d+)", colour))
    if kind == "page":
        assert page.evaluate("getComputedStyle(document.querySelector('footer span')).printColorAdjust") == "exact"


def test_a_high_still_picture_prints_on_one_page_and_is_no_wider_than_a_phone(show):
    fn, args = m.network("lenet")
    page = show(viz.diff((fn, args), (m.network("lenet")[0], args)).html(), width=390)
    assert page.evaluate(OVERFLOW) <= 0
    high = show(viz.plot_step(jax.jit(jax.grad(m.lenet_loss)), *m.network("gradient")[1]).html(), width=390)
    high.add_style_tag(content="svg { width: 300px; height: 3000px }")
    assert high.locator("svg").get_attribute("aria-label")
    assert len(re.findall(rb"/Type /Page\b", high.pdf(format="A4"))) == 1


@pytest.mark.parametrize("width", [1280, 390])
def test_without_scripts_the_picture_is_there_and_prints_on_one_page(show, width, tmp_path):
    path = drawn("lenet").save(str(tmp_path / "net.html"))
    context = show(plotted("resnet")).context.browser.new_context(
        java_script_enabled=False, viewport={"width": width, "height": 900}
    )
    page = context.new_page()
    page.goto(f"file://{path}")
    shown = page.locator("svg").bounding_box()
    assert shown is not None
    assert shown["x"] + shown["width"] <= width
    assert shown["width"] > 100
    pages = len(re.findall(rb"/Type /Page\b", page.pdf()))
    context.close()
    assert pages == 1


@pytest.mark.parametrize("kind", ["sandbox", "policy"])
def test_a_frame_without_scripts_shows_the_picture(show, kind):
    """As a viewer of notebooks shows it that switches scripts off, or forbids them by a policy of its own."""
    shown = drawn("lenet")._repr_mimebundle_()["text/html"]
    page = show("<svg></svg>").context.browser.new_page()
    if kind == "sandbox":
        page.set_content(shown.replace("<iframe ", "<iframe sandbox ", 1))
    else:
        page.set_content(f"<meta http-equiv='Content-Security-Policy' content=\"script-src 'none'\">{shown}")
    inner = page.frame_locator("iframe")
    assert inner.locator("svg text", has_text="conv1").is_visible()
    assert inner.locator("svg").bounding_box()["height"] > 300
    assert inner.locator(".tools").is_hidden()
    assert inner.locator("noscript").is_visible() is (kind == "sandbox")
    page.close()


def test_texts_fit_their_boxes(show):
    page = show(plotted("transformer gradient"))
    page.select_option("#level", "all")
    wide = """() => [...svg.querySelectorAll('.box')].flatMap(box => [...box.querySelectorAll('text')].filter(
      text => text.getBBox().width > box.querySelector('rect, ellipse').getBBox().width)).map(e => e.textContent)"""
    assert page.evaluate(wide) == []


def test_colours_are_the_readers(show):
    def background(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert background(show(plotted("lenet"), color_scheme="light")) == "rgb(255, 255, 255)"
    page = show(plotted("lenet"), color_scheme="dark")
    assert background(page) == "rgb(30, 30, 30)"
    page.locator("#theme").click()
    assert background(page) == "rgb(255, 255, 255)"
    page = show(plotted("lenet"), color_scheme="light")
    page.emulate_media(color_scheme="dark")
    page.locator("html[data-theme=dark]").wait_for()
    assert background(show(plotted("lenet", theme="dark"), color_scheme="light")) == "rgb(30, 30, 30)"


@pytest.mark.parametrize("kind", ["diff", "step"])
def test_a_still_picture_has_the_colours_of_the_reader(show, kind):
    """Its text and background change, the colours of its boxes stay."""
    fn, args = m.network("lenet")
    step, (params, images, labels) = jax.grad(m.lenet_loss), m.network("gradient")[1]
    plot = viz.diff((fn, args), (fn, args)) if kind == "diff" else viz.plot_step(step, params, images, labels)
    look = """() => ({
      page: getComputedStyle(document.body).backgroundColor,
      picture: getComputedStyle(document.querySelector('svg polygon')).fill,
      text: [...new Set([...document.querySelectorAll('svg text')].map(e => getComputedStyle(e).fill))],
    })"""
    light, dark = (show(plot.html(), color_scheme=name).evaluate(look) for name in ("light", "dark"))
    assert (light["page"], light["picture"]) == ("rgb(255, 255, 255)", "rgb(255, 255, 255)")
    assert (dark["page"], dark["picture"]) == ("rgb(30, 30, 30)", "rgb(30, 30, 30)")
    assert "rgb(36, 41, 47)" in light["text"]
    assert "rgb(36, 41, 47)" not in dark["text"]
    assert "rgb(230, 230, 230)" in dark["text"]
    shown = plot._repr_mimebundle_()["text/html"]
    page = show(f"<body data-jp-theme-light='false'>{shown}</body>", color_scheme="light")
    inner = page.frame_locator("iframe")
    inner.locator("svg").wait_for()
    assert inner.locator("html").get_attribute("data-theme") == "dark"


def test_the_fit_follows_the_width_until_the_reader_zooms(show):
    page = show(plotted("resnet"), width=1000)
    page.locator("#fit").click()
    scale = page.evaluate("page.scale")
    page.set_viewport_size({"width": 390, "height": 700})
    page.wait_for_function("before => page.scale !== before", arg=scale)
    assert page.evaluate("svg.getBoundingClientRect().width <= view.clientWidth + 1")
    page.locator("#in").click()
    scale = page.evaluate("page.scale")
    page.set_viewport_size({"width": 1000, "height": 700})
    page.wait_for_function("() => innerWidth === 1000")
    page.evaluate("() => new Promise(requestAnimationFrame)")
    assert page.evaluate("page.scale") == pytest.approx(scale)


def test_the_table_opens_and_closes_without_a_script(show):
    fn, args = m.network("flax")
    page = show(to_html(viz.trace(fn, *args, max_nodes=None)))
    row = page.get_by_text("query (FullyConnected")
    assert row.is_visible()
    page.get_by_text("MultiHeadDotProductAttention_0").first.click()
    assert not row.is_visible()
    page.get_by_text("MultiHeadDotProductAttention_0").first.click()
    assert row.is_visible()
    lefts = page.evaluate("""() => [...document.querySelectorAll('[role=row]')].filter(e => e.offsetParent).map(
      row => row.children[2].getBoundingClientRect().right)""")
    assert max(lefts) - min(lefts) < 1


def test_zoom_by_wheel_keys_and_buttons(show):
    page = show(plotted("resnet"))
    scale = page.evaluate("page.scale")
    page.locator("#in").click()
    assert page.evaluate("page.scale") == pytest.approx(scale * 1.25)
    page.keyboard.press("-")
    assert page.evaluate("page.scale") == pytest.approx(scale)
    target = box(page, "Pooling")
    at = target.bounding_box()
    page.mouse.move(at["x"] + at["width"] / 2, at["y"] + at["height"] / 2)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    page.wait_for_function("before => page.scale > before * 1.5", arg=scale)
    after = target.bounding_box()  # what is under the mouse stays there
    assert after["y"] + after["height"] / 2 == pytest.approx(at["y"] + at["height"] / 2, abs=3)
    top = page.evaluate("view.scrollTop")
    page.mouse.move(30, 300)
    page.mouse.down()
    page.mouse.move(30, 200)
    page.mouse.up()
    assert page.evaluate("view.scrollTop") == pytest.approx(top + 100, abs=2)
    page.keyboard.press("0")
    assert page.evaluate("page.scale") == pytest.approx(scale)


def frame(html, attributes=""):
    style = "style='width:100%;height:500px'"
    return f"<body data-jp-theme-light='false'><iframe {attributes} {style} srcdoc='{html}'></iframe>"


@pytest.mark.parametrize("attributes", ["", "sandbox='allow-scripts'"])
def test_a_page_works_in_a_frame_of_a_notebook(show, attributes):
    text = plotted("nested").replace("&", "&amp;").replace("'", "&#39;")
    page = show(frame(text, attributes), color_scheme="light")
    inner = page.frame_locator("iframe")
    inner.locator(".box").first.wait_for()
    inner.locator("#level").select_option("0")
    inner.locator("#svg .box", has_text="stage0").click()
    assert inner.locator("#svg .bar").count() == 1
    theme = inner.locator("html").get_attribute("data-theme")
    assert theme == ("light" if attributes else "dark")  # what is around a sandbox is out of its reach


def test_hostile_names_are_only_text(show):
    plot = hostile()
    page = show(plot.html())
    told = []
    for item in range(page.evaluate("net.root")):
        page.evaluate("item => { reveal(item); tell(item) }", item)
        told.append(page.locator("#panel").inner_text())
    assert any("<script>alert(1)" in text for text in told)
    assert page.locator("script").count() == 2
    page = show(plot._repr_mimebundle_()["text/html"])  # a dialog or an error would fail
    page.frame_locator("iframe").locator(".box").first.wait_for()
    assert page.locator("img").is_hidden()


def test_blocks_have_the_colours_of_their_cost(show):
    page = show(plotted("nested", heat="flops"))
    page.select_option("#level", "0")
    fills = """() => [...svg.querySelectorAll('.box.block')].map(box => [
      getComputedStyle(box.querySelector('rect')).fill, net.blocks[box.dataset.item - net.root].fill])"""
    found = page.evaluate(fills)
    assert len(found) == 2
    for shown, meant in found:
        red, green, blue = (int(meant[at : at + 2], 16) for at in (1, 3, 5))
        assert shown == f"rgb({red}, {green}, {blue})"
