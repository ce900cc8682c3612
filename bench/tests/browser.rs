//! report.html in a real browser: headless Chromium, spoken to by the DevTools protocol over a pipe.
//!
//! Needs `chromium-headless-shell` or `chromium`, and so is ignored unless asked for: `cargo xtask test
//! browser` installs it. With `BENCH_SCREENSHOTS=DIR` the pictures are kept there.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value as Json, json};

use bench::report::html;
use bench::results::Results;

fn example() -> Results {
    serde_json::from_str(include_str!("data/example.json")).unwrap()
}

/// The browsers that will do, the best first.
const BROWSERS: [&str; 3] = ["chromium-headless-shell", "chromium", "chromium-browser"];

/// A browser with one page.
struct Browser {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    session: Option<String>,
    calls: u64,
    /// What the browser told unasked: `{method, params}`.
    events: Vec<Json>,
}

impl Browser {
    /// Starts a browser whose profile is in `dir`.
    fn start(dir: &Path) -> Browser {
        let found = BROWSERS.iter().find_map(|name| {
            let paths = std::env::var_os("PATH")?;
            std::env::split_paths(&paths).map(|path| path.join(name)).find(|path| path.exists())
        });
        let program =
            found.expect("no browser; install one: apt-get install chromium-headless-shell");
        // The protocol is spoken on descriptors 3 and 4.
        let mut child = Command::new("sh")
            .args(["-c", r#"exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1"#])
            .arg(program)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
            .args(["--no-first-run", "--remote-debugging-pipe"])
            .arg(format!("--user-data-dir={}", dir.display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let output = BufReader::new(output);
        let mut browser =
            Browser { child, input, output, session: None, calls: 0, events: Vec::new() };
        let targets = browser.call("Target.getTargets", json!({}));
        let targets = targets["targetInfos"].as_array().unwrap();
        let page = targets.iter().find(|target| target["type"] == "page").expect("no page");
        let attach = json!({"targetId": page["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", attach);
        browser.session = Some(session["sessionId"].as_str().unwrap().into());
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    fn message(&mut self) -> Json {
        let mut bytes = Vec::new();
        self.output.read_until(0, &mut bytes).unwrap();
        assert_eq!(bytes.pop(), Some(0), "the browser ended");
        serde_json::from_slice(&bytes).unwrap()
    }

    fn call(&mut self, method: &str, params: Json) -> Json {
        self.calls += 1;
        let mut message = json!({"id": self.calls, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.input.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let mut reply = self.message();
            if reply["id"] == self.calls {
                assert!(reply.get("error").is_none(), "{method}: {reply}");
                return reply["result"].take();
            }
            self.events.push(reply);
        }
    }

    /// Loads a page, and returns when all of it is there.
    fn open(&mut self, path: &Path) {
        self.events.clear();
        self.call("Page.navigate", json!({"url": format!("file://{}", path.display())}));
        while !self.events.iter().any(|event| event["method"] == "Page.loadEventFired") {
            let event = self.message();
            self.events.push(event);
        }
    }

    /// The value of an expression of JavaScript.
    fn value(&mut self, expression: &str) -> Json {
        let ask = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let reply = self.call("Runtime.evaluate", ask);
        assert!(reply.get("exceptionDetails").is_none(), "{expression}: {reply}");
        reply["result"]["value"].clone()
    }

    /// How the page is seen.
    fn look(&mut self, width: u32, scheme: &str) {
        let screen =
            json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500});
        self.call("Emulation.setDeviceMetricsOverride", screen);
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", media);
    }

    /// A picture (PNG, as base64) of the page from its top, at most `height` high.
    fn screenshot(&mut self, width: u32, height: f64) -> Vec<u8> {
        let clip = json!({"x": 0, "y": 0, "width": width, "height": height, "scale": 1});
        let ask = json!({"clip": clip, "captureBeyondViewport": true});
        let picture = self.call("Page.captureScreenshot", ask);
        decode(picture["data"].as_str().unwrap())
    }

    /// What went wrong on the page, and what it asked the network for.
    fn complaints(&self, page: &Path) -> Vec<String> {
        let url = format!("file://{}", page.display());
        let wrong = |event: &&Json| match event["method"].as_str().unwrap_or_default() {
            "Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded" => true,
            "Network.requestWillBeSent" => {
                let asked = event["params"]["request"]["url"].as_str().unwrap_or_default();
                asked != url && !asked.starts_with("data:")
            }
            _ => false,
        };
        self.events.iter().filter(wrong).map(Json::to_string).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // A failure here is that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Base64, as the protocol has it.
fn decode(text: &str) -> Vec<u8> {
    let (mut bits, mut held, mut bytes) = (0u32, 0, Vec::new());
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            _ => 63,
        };
        bits = (bits << 6) | u32::from(value);
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
        }
    }
    bytes
}

/// What is wrong with the page as it is seen, in words; an empty list if nothing is.
const CHECK: &str = r#"(() => {
  const wrong = [];
  const plots = [...document.querySelectorAll("figure svg")];
  if (plots.length !== 10) wrong.push(`${plots.length} plots`);
  for (const plot of plots) {
    const name = plot.getAttribute("aria-label");
    const box = plot.getBoundingClientRect();
    if (box.width < 250 || box.height < 150) wrong.push(`${name}: ${box.width} by ${box.height}`);
    const shapes = [...plot.querySelectorAll("path, rect, circle")].filter((shape) => {
      const own = shape.getBoundingClientRect();
      return own.width + own.height > 0;
    });
    if (shapes.length < 5) wrong.push(`${name}: ${shapes.length} shapes`);
    // Nothing is outside the plot's card, and no label lies on another.
    const card = plot.closest("figure").getBoundingClientRect();
    const texts = [...plot.querySelectorAll("text")].map((text) => [text, text.getBoundingClientRect()]);
    texts.forEach(([text, a], index) => {
      if (a.left < card.left || a.right > card.right) wrong.push(`${name}: outside: ${text.textContent}`);
      for (const [other, b] of texts.slice(index + 1)) {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 4) wrong.push(`${name}: ${text.textContent} on ${other.textContent}`);
      }
    });
  }
  const page = document.documentElement;
  if (page.scrollWidth > page.clientWidth) wrong.push(`${page.scrollWidth} wide, ${page.clientWidth} seen`);
  return wrong;
})()"#;

/// The contrast of the page's text with its ground, at least (WCAG 2.2, 1.4.3: 4.5).
const CONTRAST: &str = r#"(() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\d.]+/g).map((part) => part / 255)
      .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const colour = getComputedStyle(element).backgroundColor;
      if (colour.startsWith("rgb(")) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  let least = 21;
  for (const element of document.querySelectorAll("p, li, dt, dd, td, th, pre, figcaption, svg text.tick, svg text.axis")) {
    const style = getComputedStyle(element);
    const [a, b] = [light(element.closest("svg") ? style.fill : style.color), light(ground(element))];
    least = Math.min(least, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return least;
})()"#;

#[test]
#[ignore = "needs a browser: cargo xtask test browser"]
fn the_report_is_sound_in_a_browser() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("browser");
    fs::create_dir_all(&dir).unwrap();
    let page: PathBuf = dir.join("report.html");
    fs::write(&page, html::render(&example())).unwrap();
    let kept = std::env::var_os("BENCH_SCREENSHOTS").map(PathBuf::from);
    let mut browser = Browser::start(&dir.join("profile"));
    let mut grounds = Vec::new();
    for (name, width, height, scheme) in [
        ("report-light", 1200, 2700.0, "light"),
        ("report-dark", 1200, 2700.0, "dark"),
        ("report-phone", 390, 2600.0, "light"),
        ("report-phone-dark", 390, 2600.0, "dark"),
    ] {
        browser.look(width, scheme);
        browser.open(&page);
        assert_eq!(browser.value(CHECK), json!([]), "{name}");
        let contrast = browser.value(CONTRAST).as_f64().unwrap();
        assert!(contrast >= 4.5, "{name}: contrast {contrast}");
        grounds.push(browser.value("getComputedStyle(document.body).backgroundColor"));
        let picture = browser.screenshot(width, height);
        assert!(picture.starts_with(b"\x89PNG") && picture.len() > 20_000, "{name}");
        if let Some(dir) = &kept {
            fs::write(dir.join(format!("{name}.png")), picture).unwrap();
        }
        assert_eq!(browser.complaints(&page), [""; 0], "{name}");
    }
    assert_ne!(grounds[0], grounds[1], "dark is not light");

    // The script: a click on the legend takes a setting out of the plots, another brings it back.
    let seen = "[...document.querySelectorAll('#w1 figure path.line[data-k=\"4\"]')]\
                .filter((line) => line.getClientRects().length > 0).length";
    let chip = "document.querySelector('#w1 [data-chip=\"4\"]').click()";
    assert_eq!(browser.value(seen), json!(1));
    browser.value(chip);
    assert_eq!(browser.value(seen), json!(0));
    browser.value(chip);
    assert_eq!(browser.value(seen), json!(1));
    assert_eq!(
        browser.value("[...document.querySelectorAll('button.copy')].some((b) => b.hidden)"),
        json!(false)
    );

    // Without the script all that is to be read is there.
    browser.call("Emulation.setScriptExecutionDisabled", json!({"value": true}));
    browser.open(&page);
    assert_eq!(browser.value(CHECK), json!([]), "without the script");
    assert_eq!(browser.complaints(&page), [""; 0], "without the script");
}

#[test]
#[ignore = "needs a browser: cargo xtask test browser"]
fn text_of_the_document_runs_no_script() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("browser-hostile");
    fs::create_dir_all(&dir).unwrap();
    let page: PathBuf = dir.join("report.html");
    let mut results = example();
    let hostile = "</script><img src=x onerror=\"window.hit=1\"><script>window.hit=1</script>'\"";
    results.question = hostile.into();
    results.notes = vec![hostile.into()];
    for row in &mut results.rows {
        row.command = vec![hostile.into()];
        row.setting.insert(hostile.into(), format!("{hostile}{}", row.id));
    }
    fs::write(&page, html::render(&results)).unwrap();
    let mut browser = Browser::start(&dir.join("profile"));
    browser.look(1200, "light");
    browser.open(&page);
    assert_eq!(browser.value("window.hit === undefined"), json!(true));
    assert_eq!(browser.value("document.querySelector('h1').textContent"), json!(hostile));
    assert_eq!(browser.value("document.querySelectorAll('img').length"), json!(0));
    assert_eq!(browser.value("document.querySelectorAll('script').length"), json!(1));
    assert_eq!(browser.complaints(&page), [""; 0]);
}
