package report

import (
	"bytes"
	"fmt"
	"image/color"
	"os"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"seckill/services/bench/internal/scenario"
)

var (
	grey = color.RGBA{R: 0x88, G: 0x88, B: 0x88, A: 0xff}
	blue = color.RGBA{R: 0x1f, G: 0x5f, B: 0xa8, A: 0xff}
	warm = color.RGBA{R: 0xc8, G: 0x4b, B: 0x1e, A: 0xff}
)

type series struct {
	name  string
	color color.Color
	dash  bool
	y     func(scenario.CurvePoint) float64
}

// plotCurve draws throughput above, latency below, both against the number of connections.
func plotCurve(path string, f *scenario.Figures) error {
	top, err := panel("Answers per second", f, []series{
		{"noop (gin alone)", grey, false, func(p scenario.CurvePoint) float64 { return p.Noop }},
		{"accepted reservations", blue, false, func(p scenario.CurvePoint) float64 { return p.Accept }},
	})
	if err != nil {
		return err
	}
	bottom, err := panel("Milliseconds", f, []series{
		{"noop p99", grey, false, func(p scenario.CurvePoint) float64 { return p.NoopP99 }},
		{"reservation p50", blue, true, func(p scenario.CurvePoint) float64 { return p.AcceptP50 }},
		{"reservation p99", warm, false, func(p scenario.CurvePoint) float64 { return p.AcceptP99 }},
	})
	if err != nil {
		return err
	}
	top.Title.Text = fmt.Sprintf("Reserving against connections, %s, %s cores", f.When.Format("2006-01-02"), f.Machine["cores"])
	bottom.X.Label.Text = "connections"
	const width, height = 16 * vg.Centimeter, 18 * vg.Centimeter
	c := vgsvg.New(width, height)
	tiles := draw.Tiles{Rows: 2, Cols: 1, PadY: 6 * vg.Millimeter, PadTop: 2 * vg.Millimeter, PadBottom: 2 * vg.Millimeter, PadLeft: 2 * vg.Millimeter, PadRight: 5 * vg.Millimeter}
	canvases := plot.Align([][]*plot.Plot{{top}, {bottom}}, tiles, draw.New(c))
	top.Draw(canvases[0][0])
	bottom.Draw(canvases[1][0])
	var b bytes.Buffer
	if _, err := c.WriteTo(&b); err != nil {
		return fmt.Errorf("draw plot: %w", err)
	}
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		return fmt.Errorf("write plot: %w", err)
	}
	return nil
}

func panel(label string, f *scenario.Figures, all []series) (*plot.Plot, error) {
	p := plot.New()
	p.Y.Label.Text = label
	p.X.Scale = plot.LogScale{}
	p.Y.Min = 0
	ticks := make([]plot.Tick, 0, len(f.Curve))
	for _, c := range f.Curve {
		ticks = append(ticks, plot.Tick{Value: float64(c.Connections), Label: strconv.Itoa(c.Connections)})
	}
	p.X.Tick.Marker = plot.ConstantTicks(ticks)
	p.Add(plotter.NewGrid())
	for _, s := range all {
		xy := make(plotter.XYs, 0, len(f.Curve))
		for _, c := range f.Curve {
			xy = append(xy, plotter.XY{X: float64(c.Connections), Y: s.y(c)})
		}
		line, points, err := plotter.NewLinePoints(xy)
		if err != nil {
			return nil, fmt.Errorf("draw %s: %w", s.name, err)
		}
		line.Color, points.Color = s.color, s.color
		line.Width = vg.Points(1.5)
		if s.dash {
			line.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
		}
		points.Shape = draw.CircleGlyph{}
		p.Add(line, points)
		p.Legend.Add(s.name, line, points)
	}
	p.Legend.Top = true
	p.Legend.Left = true
	return p, nil
}
