from pdserve.loadtest.report.progress import Progress, ProgressLine, format_progress


def test_progress_is_a_bar_with_counts():
    line = format_progress(Progress(total=8, sent=6, ended=4, failed=1))
    assert line == "[############............] 4 of 8 requests, 2 running, 1 failed"


class Terminal:
    def __init__(self):
        self.written = ""

    def write(self, text):
        self.written += text

    def flush(self):
        pass


def test_the_progress_line_is_redrawn_at_most_ten_times_a_second_and_wiped_at_the_end():
    terminal = Terminal()
    line = ProgressLine(terminal)
    for now in (5.0, 5.01, 5.09, 5.2):
        line.draw(Progress(total=8), now)
    line.close()
    assert terminal.written.count("of 8") == 2
    assert terminal.written.rsplit("\r", 2)[1].strip() == ""
