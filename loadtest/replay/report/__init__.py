"""The HTML report of a replay: one file, which loads no scripts, fonts or images.

charts.py     charts as SVG
series.py     what the charts show: values over time, from the runs
page.py       the page
style.css     its colours, light and dark
"""
