//! Plots as SVG: grouped bars, or lines over a swept parameter. Drawn by hand, because a page of rectangles and text needs
//! no library and no fonts.

use std::fmt::Write;

/// A named row of values, one per place on the x axis.
pub(crate) struct Series {
    pub(crate) name: String,
    /// Value with its smallest and largest sample; `None` where there is none.
    pub(crate) values: Vec<Option<(f64, f64, f64)>>,
}

/// What to draw.
pub(crate) struct Plot {
    pub(crate) title: String,
    /// Names of the places on the x axis.
    pub(crate) places: Vec<String>,
    /// Lines rather than bars: the places are values of one parameter.
    pub(crate) lines: bool,
    pub(crate) x_label: String,
    pub(crate) y_label: String,
    pub(crate) series: Vec<Series>,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 52.0;
/// The same for a name in all plots; told apart by people who do not see all colours (Okabe and Ito).
const COLOURS: [(&str, &str); 9] = [
    ("native", "#999999"),
    ("swap-zram", "#d55e00"),
    ("swap-file", "#e69f00"),
    ("farfield", "#0072b2"),
    ("farfield-tcp", "#56b4e9"),
    ("heap", "#009e73"),
    ("heap-tcp", "#cc79a7"),
    ("heap-objects", "#f0e442"),
    ("heap-objects-tcp", "#000000"),
];

/// Who has no colour of their own gets that of their place.
fn colour(name: &str, place: usize) -> &'static str {
    let (_, any) = COLOURS[place % COLOURS.len()];
    COLOURS.iter().find(|(known, _)| *known == name).map_or(any, |(_, colour)| colour)
}

/// The least step of 1, 2 or 5 times a power of ten that cuts `max` into at most six parts.
fn tick_step(max: f64) -> f64 {
    let rough = (max / 6.0).max(f64::MIN_POSITIVE);
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|step| *step >= rough).unwrap_or(power * 10.0)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn number(value: f64) -> String {
    if value >= 100.0 || value == value.trunc() { format!("{value:.0}") } else { format!("{value:.2}") }
}

impl Plot {
    /// The plot as an SVG document.
    pub(crate) fn svg(&self) -> String {
        let largest = self.series.iter().flat_map(|s| &s.values).flatten().map(|v| v.2).fold(0.0, f64::max);
        let largest = if largest > 0.0 { largest } else { 1.0 };
        let step = tick_step(largest);
        let top = (largest / step).ceil() * step;
        let y = |value: f64| HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM);
        let place_width = (WIDTH - LEFT - RIGHT) / self.places.len().max(1) as f64;
        let middle = |place: usize| LEFT + (place as f64 + 0.5) * place_width;

        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
        );
        let mut text = |x: f64, y: f64, anchor: &str, more: &str, words: &str| {
            let words = escape(words);
            writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\"{more}>{words}</text>").ok();
        };
        text(LEFT, 22.0, "start", " font-size=\"15\" font-weight=\"bold\"", &self.title);
        text((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 12.0, "middle", "", &self.x_label);
        let turned = format!(" transform=\"rotate(-90 16 {0:.0})\"", HEIGHT / 2.0);
        text(16.0, HEIGHT / 2.0, "middle", &turned, &self.y_label);
        for (place, name) in self.places.iter().enumerate() {
            text(middle(place), HEIGHT - BOTTOM + 18.0, "middle", "", name);
        }
        for (index, series) in self.series.iter().enumerate() {
            text(WIDTH - RIGHT + 30.0, TOP + 12.0 + 20.0 * index as f64, "start", "", &series.name);
        }
        let mut tick = 0.0;
        while tick <= top + step / 2.0 {
            text(LEFT - 6.0, y(tick) + 4.0, "end", "", &number(tick));
            tick += step;
        }
        let mut tick = 0.0;
        while tick <= top + step / 2.0 {
            let (right, at) = (WIDTH - RIGHT, y(tick));
            writeln!(out, "<path d=\"M{LEFT} {at:.1}H{right}\" stroke=\"#dddddd\"/>").ok();
            tick += step;
        }
        for (index, series) in self.series.iter().enumerate() {
            let colour = colour(&series.name, index);
            let (x, at) = (WIDTH - RIGHT + 14.0, TOP + 2.0 + 20.0 * index as f64);
            writeln!(out, "<rect x=\"{x}\" y=\"{at}\" width=\"11\" height=\"11\" fill=\"{colour}\"/>").ok();
            let bar_width = place_width * 0.8 / self.series.len() as f64;
            let mut path = String::new();
            for (place, value) in series.values.iter().enumerate() {
                let Some((value, low, high)) = *value else {
                    path.push(' '); // The line has a gap here.
                    continue;
                };
                let x = if self.lines {
                    middle(place)
                } else {
                    middle(place) + (index as f64 + 0.5 - self.series.len() as f64 / 2.0) * bar_width
                };
                if self.lines {
                    let pen = if path.is_empty() || path.ends_with(' ') { 'M' } else { 'L' };
                    write!(path, "{pen}{x:.1} {:.1}", y(value)).ok();
                    writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>", y(value)).ok();
                } else {
                    let (left, width) = (x - bar_width * 0.45, bar_width * 0.9);
                    let (at, height) = (y(value), y(0.0) - y(value));
                    writeln!(
                        out,
                        "<rect x=\"{left:.1}\" y=\"{at:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
                    )
                    .ok();
                }
                writeln!(out, "<path d=\"M{x:.1} {:.1}V{:.1}\" stroke=\"black\"/>", y(low), y(high)).ok();
            }
            if self.lines && path.contains('L') {
                writeln!(out, "<path d=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>", path.trim())
                    .ok();
            }
        }
        let (axis, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
        writeln!(out, "<path d=\"M{LEFT} {TOP}V{axis}H{right}\" fill=\"none\" stroke=\"black\"/>\n</svg>").ok();
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        for (max, step) in [(6.0, 1.0), (7.0, 2.0), (100.0, 20.0), (13_000.0, 5000.0), (0.9, 0.2)] {
            assert!((tick_step(max) - step).abs() < step * 1e-9, "{max}: {}", tick_step(max));
        }
    }

    fn plot(lines: bool, values: Vec<Option<(f64, f64, f64)>>) -> String {
        Plot {
            title: "a < b".into(),
            places: vec!["10".into(), "25".into(), "50".into()],
            lines,
            x_label: "near".into(),
            y_label: "ns".into(),
            series: vec![Series { name: "native".into(), values }],
        }
        .svg()
    }

    #[test]
    fn bars_stand_for_values_and_names_are_escaped() {
        let svg = plot(false, vec![Some((1.0, 1.0, 1.0)), None, Some((2.0, 1.5, 2.5))]);
        assert_eq!(svg.matches("fill=\"#999999\"").count(), 3); // Two bars and the legend.
        assert!(svg.contains("a &lt; b") && !svg.contains("a < b"));
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    }

    #[test]
    fn line_has_a_gap_where_a_value_is_missing() {
        let value = Some((1.0, 1.0, 1.0));
        assert_eq!(plot(true, vec![value, value, value]).matches("fill=\"none\" stroke=\"#999999\"").count(), 1);
        assert!(!plot(true, vec![value, None, value]).contains("stroke=\"#999999\""));
    }

    #[test]
    fn a_plot_without_points_is_valid() {
        let svg = plot(false, vec![None, None, None]);
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}
