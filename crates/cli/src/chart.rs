//! Line charts with logarithmic axes, as SVG.

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// One line.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub(crate) name: String,
    /// Which of [`COLOURS`].
    pub(crate) colour: usize,
    /// Dashed: a bound, not a measurement.
    pub(crate) dashed: bool,
    pub(crate) points: Vec<(f64, f64)>,
}

/// What a chart shows.
#[derive(Clone, Debug)]
pub(crate) struct Chart {
    pub(crate) title: String,
    pub(crate) x: &'static str,
    pub(crate) y: String,
    pub(crate) series: Vec<Series>,
    /// How a number of the y axis is written.
    pub(crate) y_label: fn(f64) -> String,
}

/// Colours that can be told apart on white and on black, by the colour-blind too (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(120, 120, 120),
    RGBColor(230, 159, 0),
];

/// Small enough that its letters can be read where a phone shows the whole of it.
const WIDTH: u32 = 440;
/// Without the legend.
const HEIGHT: u32 = 290;
/// A line of the legend, which stands above the plot: inside it would lie on some line or other.
const LEGEND_LINE: u32 = 18;
/// The sample of a line, and what is left free after it and after its name.
const SAMPLE: u32 = 18;
const GAP: u32 = 6;
const MARGIN: u32 = 8;

/// The colour of an algorithm, the same in every chart.
pub(crate) fn colour_of(algorithm: tilewise::Algorithm) -> usize {
    match algorithm.resolve() {
        tilewise::Algorithm::Standard => 0,
        tilewise::Algorithm::Fa1 => 1,
        _ => 2,
    }
}

/// A whole number without its last zeros: 1024, 16k.
pub(crate) fn count_label(x: f64) -> String {
    if x >= 1024.0 && x % 1024.0 == 0.0 {
        format!("{}k", x / 1024.0)
    } else {
        format!("{x}")
    }
}

/// Where the legend has each of these names: how far from the left, and in which line.
fn legend(names: &[&str]) -> Vec<(u32, u32)> {
    // A letter of the legend's size is seldom wider, and on the average it is narrower.
    let width = |name: &str| SAMPLE + GAP + 7 * name.chars().count() as u32 + 2 * GAP;
    let (mut x, mut line) = (MARGIN, 0);
    let mut places = Vec::with_capacity(names.len());
    for name in names {
        if x > MARGIN && x + width(name) > WIDTH - MARGIN {
            (x, line) = (MARGIN, line + 1);
        }
        places.push((x, line));
        x += width(name);
    }
    places
}

fn places(chart: &Chart) -> Vec<(u32, u32)> {
    let names: Vec<&str> = chart.series.iter().map(|one| one.name.as_str()).collect();
    legend(&names)
}

/// The height of a chart with its legend.
fn height(chart: &Chart) -> u32 {
    let lines = places(chart).last().map_or(0, |(_, line)| line + 1);
    HEIGHT + lines * LEGEND_LINE
}

/// The chart as an `<svg>` element. Text and axes have the colour of the text around it.
pub(crate) fn svg(chart: &Chart) -> Result<String> {
    let places = places(chart);
    let size = (WIDTH, height(chart));
    let fail = |error: &dyn std::fmt::Display| anyhow!("the chart cannot be drawn: {error}");
    let points = || chart.series.iter().flat_map(|series| &series.points);
    let range = |of: fn(&(f64, f64)) -> f64| -> (f64, f64) {
        let values = points().map(of).filter(|x| *x > 0.0 && x.is_finite());
        let (low, high) = values.fold((f64::MAX, 0f64), |(low, high), x| (low.min(x), high.max(x)));
        if high <= 0.0 { (1.0, 2.0) } else { (low, high) }
    };
    let (x, y) = (range(|p| p.0), range(|p| p.1));
    let (low, high) = (y.0 / 1.3, y.1 * 1.3);
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        let titled = area
            .titled(&chart.title, ("sans-serif", 16))
            .map_err(|e| fail(&e))?;
        let (above, plot) = titled.split_vertically(size.1 - HEIGHT + GAP);
        for (series, &(x, line)) in chart.series.iter().zip(&places) {
            let (x, y) = (
                x as i32,
                (line * LEGEND_LINE + LEGEND_LINE / 2 + GAP) as i32,
            );
            let style = COLOURS[series.colour % COLOURS.len()].stroke_width(2);
            let pieces = match series.dashed {
                true => vec![(0, 7), (11, SAMPLE as i32)],
                false => vec![(0, SAMPLE as i32)],
            };
            for (from, to) in pieces {
                let sample = PathElement::new([(x + from, y), (x + to, y)], style);
                above.draw(&sample).map_err(|e| fail(&e))?;
            }
            let at = (x + (SAMPLE + GAP) as i32, y);
            let font = ("sans-serif", 13).into_font().color(&BLACK);
            let font = font.pos(Pos::new(HPos::Left, VPos::Center));
            let name = Text::new(series.name.as_str(), at, font);
            above.draw(&name).map_err(|e| fail(&e))?;
        }
        let mut context = ChartBuilder::on(&plot)
            .margin(MARGIN)
            .margin_right(18)
            .x_label_area_size(40)
            .y_label_area_size(70)
            .build_cartesian_2d(
                (x.0..x.1 * 1.0001).log_scale().base(2.0),
                (low..high).log_scale().base(2.0),
            )
            .map_err(|e| fail(&e))?;
        context
            .configure_mesh()
            .x_desc(chart.x)
            .y_desc(&chart.y)
            .x_labels(7)
            .y_labels(7)
            .label_style(("sans-serif", 13))
            .light_line_style(TRANSPARENT)
            .bold_line_style(BLACK.mix(0.15))
            .x_label_formatter(&|x| count_label(x.round()))
            .y_label_formatter(&|y| (chart.y_label)(*y))
            .draw()
            .map_err(|e| fail(&e))?;
        for series in &chart.series {
            let colour = COLOURS[series.colour % COLOURS.len()];
            let style = colour.stroke_width(2);
            let line = series.points.iter().copied();
            let drawn = if series.dashed {
                context.draw_series(DashedLineSeries::new(line, 6, 4, style))
            } else {
                context.draw_series(LineSeries::new(line, style).point_size(2))
            };
            drawn.map_err(|e| fail(&e))?;
        }
        area.present().map_err(|e| fail(&e))?;
    }
    // Black is what is not a series: it follows the page, which may be dark.
    Ok(text.replace("\"#000000\"", "\"currentColor\"").replace(
        &format!("<svg width=\"{WIDTH}\" height=\"{}\"", size.1),
        "<svg role=\"img\"",
    ))
}

/// A chart as a file of its own, on white.
pub(crate) fn svg_file(charts: &[Chart]) -> Result<String> {
    let height: u32 = charts.iter().map(height).sum();
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    let mut at = 0;
    for chart in charts {
        let inner = svg(chart)?;
        let own = self::height(chart);
        let placed = format!("<svg y=\"{at}\" width=\"{WIDTH}\" height=\"{own}\"");
        at += own;
        text.push_str(&inner.replacen("<svg", &placed, 1));
    }
    text.push_str("</svg>\n");
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>) -> Chart {
        Chart {
            title: "a title".into(),
            x: "N",
            y: "bytes".into(),
            series: vec![Series {
                name: "fa1".into(),
                colour: 1,
                dashed: false,
                points,
            }],
            y_label: count_label,
        }
    }

    #[test]
    fn charts_hold_their_words_and_lines_and_no_fixed_black() {
        let text = svg(&chart(vec![(256.0, 1e3), (512.0, 4e3), (1024.0, 1.6e4)])).unwrap();
        assert!(text.trim_start().starts_with("<svg role"), "{text}");
        for part in ["a title", "fa1", "bytes", "polyline", "currentColor", "1k"] {
            assert!(text.contains(part), "{part}");
        }
        assert!(!text.contains("#000000"));
        let file = svg_file(&[chart(vec![(1.0, 1.0)]), chart(vec![])]).unwrap();
        assert_eq!(file.matches("<svg").count(), 3);
        assert_eq!(file.matches("</svg>").count(), 3);
    }

    #[test]
    fn the_legend_stands_above_the_plot_line_by_line() {
        let names = ["standard", "fa1", "fa2", "ceiling, avx512 fma f32", "other"];
        let places = legend(&names);
        assert_eq!(places[0], (MARGIN, 0));
        assert!((1..4).all(|n| places[n].0 > places[n - 1].0 && places[n].1 == 0));
        assert_eq!(places[4], (MARGIN, 1));
        // A name that fits nowhere has a line of its own.
        let wide = "x".repeat(99);
        assert_eq!(legend(&[&wide, "fa2"])[1], (MARGIN, 1));
        let mut several = chart(vec![(256.0, 1e3), (512.0, 4e3)]);
        let one = height(&several);
        assert_eq!(one, HEIGHT + LEGEND_LINE);
        several.series = vec![several.series[0].clone(); 9];
        assert!(height(&several) > one);
        let text = svg(&several).unwrap();
        assert_eq!(text.lines().filter(|line| line.trim() == "fa1").count(), 9);
    }
}
