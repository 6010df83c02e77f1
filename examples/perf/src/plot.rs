//! The plot: the distribution of times, and the time or rate by size.

use std::ops::Range;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::Result;
use crate::case::{Over, Work};
use crate::report::{Entry, Report};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const RDMA: RGBColor = RGBColor(0x1f, 0x5f, 0xbf);
const TCP: RGBColor = RGBColor(0xd9, 0x6b, 0x0b);
const FONT: &str = "sans-serif";

pub(crate) fn draw(report: &Report, path: &Path) -> Result<()> {
    let sweep = report.pairs().count() > 1;
    let width = if sweep { 1400 } else { 760 };
    let root = SVGBackend::new(path, (width, 560)).into_drawing_area();
    root.fill(&WHITE).map_err(failed)?;
    let root = root.titled(&report.title(), (FONT, 20)).map_err(failed)?;
    let root = root.titled(&report.place(), (FONT, 14)).map_err(failed)?;
    let root = root.titled(&report.settings(), (FONT, 14)).map_err(failed)?;
    if sweep {
        let (left, right) = root.split_horizontally(700);
        by_size(report, &left)?;
        distribution(report, &right)?;
    } else {
        distribution(report, &root)?;
    }
    Ok(root.present().map_err(|error| format!("{}: {error}", path.display()))?)
}

struct Line {
    name: String,
    over: Over,
    dashed: bool,
    points: Vec<(f64, f64)>,
}

fn by_size(report: &Report, area: &Area<'_>) -> Result<()> {
    let mut lines = Vec::new();
    for over in [Over::Rdma, Over::Tcp] {
        let entries: Vec<&Entry> =
            report.results.iter().filter(|entry| entry.over == over).collect();
        if entries.is_empty() {
            continue;
        }
        let mut add = |name: &str, dashed, of: fn(&Entry) -> f64| {
            let points = entries.iter().map(|entry| (entry.size as f64, of(entry))).collect();
            lines.push(Line { name: format!("{over}{name}"), over, dashed, points });
        };
        match report.case.work {
            Work::Latency => {
                add(", p50", false, |entry| entry.microseconds.p50);
                add(", p99", true, |entry| entry.microseconds.p99);
            }
            Work::Bandwidth => add("", false, |entry| entry.bytes_per_second / 1e6),
        }
    }
    let (caption, name) = match report.case.work {
        Work::Latency => ("Latency by size", "latency in µs"),
        Work::Bandwidth => ("Throughput by size", "throughput in MB/s"),
    };
    logarithmic(area, caption, ["bytes of an operation", name], &lines, &|size| bytes(*size))
}

/// Draws the time at each quantile, on a logarithmic axis of 1 / (1 - quantile).
fn distribution(report: &Report, area: &Area<'_>) -> Result<()> {
    let sizes: Vec<usize> = report.pairs().map(|(entry, _)| entry.size).collect();
    let size = sizes.first().copied().ok_or("nothing to draw")?;
    let line = |entry: &Entry| Line {
        name: entry.over.to_string(),
        over: entry.over,
        dashed: false,
        points: entry
            .distribution
            .iter()
            .map(|&(quantile, time)| (1.0 / (1.0 - quantile), time))
            .collect(),
    };
    let lines: Vec<Line> =
        report.results.iter().filter(|entry| entry.size == size).map(line).collect();
    let caption = format!("Distribution at {}", bytes(size as f64));
    logarithmic(area, &caption, ["percentile", "time of an operation in µs"], &lines, &|rare| {
        percentile(*rare)
    })
}

fn logarithmic(
    area: &Area<'_>,
    caption: &str,
    [x_name, y_name]: [&str; 2],
    lines: &[Line],
    x_label: &dyn Fn(&f64) -> String,
) -> Result<()> {
    let points = || lines.iter().flat_map(|line| line.points.iter().copied());
    let (x, y) = (span(points().map(|point| point.0)), span(points().map(|point| point.1)));
    let y = y.start / 1.5..y.end * 1.5;
    let mut chart = ChartBuilder::on(area)
        .caption(caption, (FONT, 17))
        .margin(14)
        .x_label_area_size(46)
        .y_label_area_size(70)
        .build_cartesian_2d(x.log_scale(), y.log_scale())
        .map_err(failed)?;
    chart
        .configure_mesh()
        .x_desc(x_name)
        .y_desc(y_name)
        .axis_desc_style((FONT, 15))
        .label_style((FONT, 13))
        .x_label_formatter(x_label)
        .y_label_formatter(&|value| number(*value))
        .light_line_style(WHITE)
        .draw()
        .map_err(failed)?;
    for line in lines {
        let color = if line.over == Over::Rdma { RDMA } else { TCP };
        let style = color.stroke_width(2);
        let points = line.points.iter().copied();
        let series = if line.dashed {
            chart.draw_series(DashedLineSeries::new(points, 6, 4, style)).map_err(failed)?
        } else {
            chart.draw_series(LineSeries::new(points, style)).map_err(failed)?
        };
        let dashed = line.dashed;
        series.label(&line.name).legend(move |(x, y)| {
            // The key shows a dash and a gap, or a full line.
            PathElement::new([(x, y), (x + if dashed { 10 } else { 22 }, y)], style)
        });
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .margin(12)
        .legend_area_size(34)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.4))
        .label_font((FONT, 14))
        .draw()
        .map_err(failed)?;
    Ok(())
}

/// Returns a range that a logarithmic axis can show: positive and not empty.
fn span(values: impl Iterator<Item = f64>) -> Range<f64> {
    let (mut least, mut greatest) = (f64::MAX, 0.0_f64);
    for value in values {
        // Below the resolution of the clock.
        let value = value.max(0.001);
        least = least.min(value);
        greatest = greatest.max(value);
    }
    if least >= greatest { 1.0..10.0 } else { least..greatest }
}

fn percentile(rare: f64) -> String {
    let percent = 100.0 * (1.0 - 1.0 / rare);
    let digits = (rare.log10().round() as usize).saturating_sub(2);
    format!("{percent:.digits$} %")
}

fn bytes(size: f64) -> String {
    match size as u64 {
        size if size >= 1 << 20 && size.is_multiple_of(1 << 20) => format!("{} MiB", size >> 20),
        size if size >= 1 << 10 && size.is_multiple_of(1 << 10) => format!("{} KiB", size >> 10),
        size => format!("{size} B"),
    }
}

fn number(value: f64) -> String {
    if value >= 10.0 { format!("{value:.0}") } else { format!("{value}") }
}

fn failed(error: impl std::fmt::Display) -> crate::Failure {
    format!("failed to draw the plot: {error}").into()
}
