//! A profile as a picture: memory over time, and below it the heat map. The SVG is written by hand,
//! like that of the benchmarks' plots.

use farfield_core::policy::profile::{HeatMap, Profile, Sample};
use farfield_pager::runner::ByteSize;
use std::fmt::Write;

const WIDTH: f64 = 900.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 44.0;
/// Heights of the curves, of the gap below, and of the heat map.
const CURVES: f64 = 180.0;
const GAP: f64 = 56.0;
const HEAT: f64 = 320.0;
const BOTTOM: f64 = 44.0;
/// Least height of a row in the heat map.
const ROW_MIN: f64 = 3.0;
/// Colours from cold to hot (after viridis). Colour-blind readers can tell them apart, also in
/// print.
const COLOURS: [(f64, f64, f64); 5] =
    [(68.0, 1.0, 84.0), (59.0, 82.0, 139.0), (33.0, 145.0, 140.0), (94.0, 201.0, 98.0), (253.0, 231.0, 37.0)];

/// Draws the whole picture as SVG.
pub(super) fn draw(profile: &Profile) -> String {
    let samples = &profile.observation.samples;
    let end_ms = samples.last().map_or(1, |sample| sample.at_ms.max(1));
    let height = TOP + CURVES + GAP + HEAT + BOTTOM;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    text(&mut svg, LEFT, 20.0, "start", &format!("Memory of {}", profile.command.join(" ")));
    curves(&mut svg, samples, end_ms);
    heat(&mut svg, &profile.findings.heat, end_ms);
    svg += "</svg>\n";
    svg
}

fn x_of(at_ms: u64, end_ms: u64) -> f64 {
    LEFT + (WIDTH - LEFT - RIGHT) * (at_ms as f64 / end_ms as f64).min(1.0)
}

fn curves(svg: &mut String, samples: &[Sample], end_ms: u64) {
    type Value = fn(&Sample) -> u64;
    let lines: [(&str, &str, Value); 3] = [
        ("anonymous", "#0072b2", |sample| sample.anonymous_bytes),
        ("of files", "#999999", |sample| sample.file_bytes),
        ("anonymous, used lately", "#d55e00", |sample| sample.anonymous_used_bytes),
    ];
    let most = lines.iter().flat_map(|line| samples.iter().map(line.2)).max().unwrap_or(0).max(1);
    let y_of = |bytes: u64| TOP + CURVES * (1.0 - bytes as f64 / most as f64);
    let right = WIDTH - RIGHT;
    for part in 0..=2 {
        let bytes = most / 2 * part;
        let y = y_of(bytes);
        let _ = writeln!(svg, "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/>");
        text(svg, LEFT - 6.0, y + 4.0, "end", &ByteSize(bytes).to_string());
    }
    for (index, (name, colour, value)) in lines.iter().enumerate() {
        let points = samples.iter().map(|s| format!("{:.1},{:.1}", x_of(s.at_ms, end_ms), y_of(value(s))));
        let points = points.collect::<Vec<_>>().join(" ");
        let _ = writeln!(svg, "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>");
        let x = LEFT + 10.0 + 170.0 * index as f64;
        let _ = writeln!(svg, "<rect x=\"{x}\" y=\"28\" width=\"10\" height=\"10\" fill=\"{colour}\"/>");
        text(svg, x + 14.0, 37.0, "start", name);
    }
    times(svg, TOP + CURVES, end_ms);
}

fn heat(svg: &mut String, heat: &HeatMap, end_ms: u64) {
    let top = TOP + CURVES + GAP;
    text(
        svg,
        LEFT,
        top - 10.0,
        "start",
        "Share of each mapping that was used while bits gathered: dark none, bright all",
    );
    let all: u64 = heat.rows.iter().map(|row| row.bytes).sum();
    let mut y = top;
    for row in &heat.rows {
        // Small mappings take height from the large ones.
        let left = HEAT - ROW_MIN * heat.rows.len() as f64;
        let height = ROW_MIN + left.max(0.0) * row.bytes as f64 / all.max(1) as f64;
        if y + height > top + HEAT + 1.0 {
            break;
        }
        if height >= 14.0 {
            text(svg, LEFT - 6.0, y + height / 2.0 + 4.0, "end", &ByteSize(row.bytes).to_string());
        }
        let _ = writeln!(svg, "<g><title>{}</title>", escape(&format!("{} ({})", row.name, ByteSize(row.bytes))));
        let slices = row.used_bytes.len();
        let mut slice = 0;
        while slice < slices {
            let Some(level) = row.share(slice).map(level) else {
                slice += 1;
                continue;
            };
            // Neighbours of one colour are one rectangle.
            let end = (slice..slices).find(|&next| row.share(next).map(self::level) != Some(level)).unwrap_or(slices);
            let x = x_of(slice as u64 * heat.slice_ms, end_ms);
            let width = x_of(end as u64 * heat.slice_ms, end_ms) - x;
            let fill = colour(f64::from(level) / f64::from(LEVELS));
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{fill}\"/>"
            );
            slice = end;
        }
        *svg += "</g>\n";
        y += height;
    }
    times(svg, top + HEAT, end_ms);
}

/// Number of colours that are told apart.
const LEVELS: u32 = 20;

fn level(share: f64) -> u32 {
    // Little use must not look like no use.
    (share * f64::from(LEVELS)).ceil() as u32
}

fn colour(share: f64) -> String {
    let place = share.clamp(0.0, 1.0) * (COLOURS.len() - 1) as f64;
    let index = (place as usize).min(COLOURS.len() - 2);
    let ((r, g, b), (s, h, c)) = (COLOURS[index], COLOURS[index + 1]);
    let mix = |from: f64, to: f64| (from + (to - from) * (place - index as f64)) as u8;
    format!("#{:02x}{:02x}{:02x}", mix(r, s), mix(g, h), mix(b, c))
}

/// Draws the time axis.
fn times(svg: &mut String, y: f64, end_ms: u64) {
    for part in 0..=4 {
        let at_ms = end_ms * part / 4;
        let x = x_of(at_ms, end_ms);
        let _ = writeln!(svg, "<line x1=\"{x:.1}\" y1=\"{y}\" x2=\"{x:.1}\" y2=\"{}\" stroke=\"#333333\"/>", y + 4.0);
        text(svg, x, y + 18.0, "middle", &format!("{:.1} s", at_ms as f64 / 1000.0));
    }
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", escape(text));
}

fn escape(text: &str) -> String {
    let plain = |c: char| if c.is_control() { '?' } else { c };
    let text: String = text.chars().map(plain).collect();
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    //! Danger: a picture that no browser shows.
    use super::*;
    use farfield_core::policy::profile::{Area, AreaKind, AreaSample, Observation, VERSION, analyse};

    #[test]
    fn colours_go_from_cold_to_hot() {
        assert_eq!((colour(0.0), colour(1.0), colour(9.0)), ("#440154".into(), "#fde725".into(), "#fde725".into()));
        assert_eq!((level(0.0), level(0.001), level(1.0)), (0, 1, LEVELS));
    }

    #[test]
    fn any_program_makes_a_picture() {
        let area =
            |start| Area { process: 1, start, end: start + 9, kind: AreaKind::Anonymous, name: "<&\u{1b}>".into() };
        for areas in [0u32, 1, 3, 500] {
            let sample = |at: u64| Sample {
                at_ms: at * 100,
                since_ms: 100,
                epoch: at as u32,
                anonymous_bytes: at << 20,
                areas: (0..areas)
                    .map(|area| AreaSample { area, resident_bytes: 1 << 20, used_bytes: at << 16 })
                    .collect(),
                ..Sample::default()
            };
            let observation = Observation {
                areas: (0..areas).map(|index| area(u64::from(index) * 10)).collect(),
                samples: (1..20).map(sample).collect(),
                ..Observation::default()
            };
            let findings = analyse(&observation);
            let command = vec!["a\"<b>".into()];
            let svg = draw(&Profile { version: VERSION, command, observation, far_runs: vec![], findings });
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && !svg.contains('\u{1b}'));
            assert_eq!(svg.matches("<g>").count(), svg.matches("</g>").count());
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{areas}");
            assert_eq!(areas > 0, svg.contains("<title>1 0x0 &lt;&amp;?&gt;"), "{areas}");
        }
    }
}
