"""A headless browser for tests: Debian's Chromium through its driver, which speaks plain HTTP."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

from tests.processes import PATIENCE_S

MISSING = "no browser here: apt-get install chromium chromium-driver"

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--disable-dev-shm-usage",
)  # fmt: skip


def is_there():
    return bool(shutil.which("chromedriver") and (shutil.which("chromium") or shutil.which("google-chrome")))


class Browser:
    """One window. Requests that leave this machine are refused by a proxy that is not there, and counted by the page."""

    def __init__(self, folder):
        self.log = folder / "chromedriver.log"
        # Chromium makes sockets there, whose names may have 107 characters.
        self.temporary = tempfile.mkdtemp(prefix="browser-", dir="/tmp")
        with self.log.open("w") as log:
            environment = {**os.environ, "TMPDIR": self.temporary}
            self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=log, stderr=log, env=environment)
        try:
            self._start()
        except BaseException:
            self._stop()
            raise

    def _start(self):
        flags = [*FLAGS, f"--user-data-dir={self.temporary}/profile"]
        options = {"args": flags, "binary": shutil.which("chromium") or shutil.which("google-chrome")}
        self.base = f"http://127.0.0.1:{self._port()}"
        answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})
        self.base += f"/session/{answer['sessionId']}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self._ask("DELETE", "")
        finally:
            self._stop()

    def _stop(self):
        self.driver.terminate()
        self.driver.wait(PATIENCE_S)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _port(self):
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            text = self.log.read_text()
            if "successfully on port" in text:
                return int(text.rpartition("successfully on port ")[2].split(".")[0])
            time.sleep(0.05)
        raise TimeoutError(text)

    def _ask(self, method, path, body=None):
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()[:500]) from error

    def open(self, url, width=1200, height=900):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.cdp("Emulation.setDeviceMetricsOverride", metrics)
        self._ask("POST", "/url", {"url": url})

    def cdp(self, command, parameters):
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def media(self, scheme="light", kind=""):
        self.cdp("Emulation.setEmulatedMedia", {"media": kind, "features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def run(self, script, *arguments):
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait_for(self, script, seconds=PATIENCE_S):
        """Run a script until it returns something true, and return that."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.run(script)
            if found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def screenshot(self, path, whole=False):
        parameters = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.cdp("Page.getLayoutMetrics", {})["cssContentSize"]
            parameters["clip"] = {**size, "scale": 1}
        path.write_bytes(base64.b64decode(self.cdp("Page.captureScreenshot", parameters)["data"]))

    def pdf(self, path):
        path.write_bytes(base64.b64decode(self.cdp("Page.printToPDF", {"printBackground": True})["data"]))
