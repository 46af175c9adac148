"""The report of a load run per task."""

from loadtest.load.task_report import ENDPOINTS_SHOWN, TaskReport, inserted


def report() -> TaskReport:
    found = TaskReport()
    chat = found.of("chat")
    chat.requests, chat.prompt_tokens, chat.cached_tokens = 21, 400, 300
    chat.first_token_s = [place / 1000 for place in range(21)]
    chat.endpoints.update({"10.0.0.1:80": 3, "10.0.0.2:80": 1})
    refused = found.of("batch")
    refused.requests = 2
    refused.errors["429 <saturated>"] += 2
    return found


def test_each_task_has_its_requests_errors_times_and_hit_rate() -> None:
    lines = [line.split() for line in report().text().splitlines()]
    assert ["chat", "21", "0", "10.0", "19.0", "–", "–", "75.0%"] in lines
    assert ["batch", "2", "2", "–", "–", "–", "–", "–"] in lines


def test_each_task_has_the_share_of_each_endpoint_and_its_errors() -> None:
    text = report().text()
    assert "  chat: 10.0.0.1:80 75.0%, 10.0.0.2:80 25.0%\n" in text
    assert "  batch: not told by the gateway\n" in text
    assert "  batch: 2 × 429 <saturated>\n" in text


def test_without_errors_there_is_no_list_of_them() -> None:
    found = TaskReport()
    found.of("chat").requests = 1
    assert "\nErrors\n" not in found.text()


def test_many_endpoints_are_cut_with_their_number() -> None:
    found = TaskReport()
    found.of("chat").endpoints.update({str(number): 1 for number in range(ENDPOINTS_SHOWN + 5)})
    assert found.text().endswith("and 5 more\n")


def test_one_answer_is_its_own_median() -> None:
    found = TaskReport()
    found.of("chat").first_token_s.append(0.25)
    assert "250.0  250.0" in " ".join(found.text().split()).replace(" ", "  ")


def test_the_page_gets_the_report_inside_its_body_and_escaped() -> None:
    page = inserted("<html><body><p>a</p></body></html>", report().html())
    assert page.startswith("<html><body><p>a</p><section>") and page.endswith("</section></body></html>")
    assert "<td>75.0%</td>" in page and "10.0.0.1:80 75.0%" in page
    assert "2 × 429 &lt;saturated&gt;" in page
    assert inserted("no body", "<p>") == "no body<p>"
