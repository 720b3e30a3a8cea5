// Command helm-render renders a chart as helm template would, where no Helm can be installed: text/template
// with sprig, and the functions that Helm adds, as far as our charts use them. A chart has no subcharts but
// libraries, which are named here, since their templates are all that there is of them.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"sigs.k8s.io/yaml"
)

type object = map[string]interface{}

func main() {
	name := flag.String("name", "release", "name of the release")
	namespace := flag.String("namespace", "default", "namespace of the release")
	library := flag.String("library", "", "directory of a library chart that the chart depends on")
	flag.Parse()
	if flag.NArg() < 1 {
		fmt.Fprintln(os.Stderr, "usage: helm-render [flags] CHART [VALUES...]")
		os.Exit(2)
	}
	if err := run(*name, *namespace, *library, flag.Arg(0), flag.Args()[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(name, namespace, library, chart string, files []string) error {
	values := object{}
	if library != "" {
		theirs, err := read(filepath.Join(library, "values.yaml"))
		if err != nil {
			return err
		}
		described, err := read(filepath.Join(library, "Chart.yaml"))
		if err != nil {
			return err
		}
		// A dependency's own defaults stand under its name.
		values[fmt.Sprint(described["name"])] = theirs
	}
	for _, file := range append([]string{filepath.Join(chart, "values.yaml")}, files...) {
		more, err := read(file)
		if err != nil {
			return err
		}
		merge(values, more)
	}
	metadata, err := read(filepath.Join(chart, "Chart.yaml"))
	if err != nil {
		return err
	}
	described := object{}
	for key, value := range metadata {
		described[strings.ToUpper(key[:1])+key[1:]] = value
	}
	templates := template.New("chart").Option("missingkey=zero")
	templates.Funcs(functions(templates))
	if library != "" {
		if _, err := parse(templates, library); err != nil {
			return err
		}
	}
	names, err := parse(templates, chart)
	if err != nil {
		return err
	}
	context := object{
		"Values":  values,
		"Chart":   described,
		"Release": object{"Name": name, "Namespace": namespace, "Service": "Helm"},
	}
	for _, each := range names {
		var text strings.Builder
		if err := templates.ExecuteTemplate(&text, each, context); err != nil {
			return err
		}
		// What is not there is printed as Go prints it; Helm removes it as well.
		body := strings.TrimSpace(strings.ReplaceAll(text.String(), "<no value>", ""))
		if body != "" {
			fmt.Printf("---\n# Source: %s\n%s\n", each, body)
		}
	}
	return nil
}

// parse adds a chart's templates and returns the names of those that make manifests.
func parse(templates *template.Template, chart string) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	if err != nil {
		return nil, err
	}
	sort.Strings(files)
	var names []string
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if _, err := templates.New(file).Parse(string(text)); err != nil {
			return nil, err
		}
		if strings.HasSuffix(file, ".yaml") {
			names = append(names, file)
		}
	}
	return names, nil
}

func functions(templates *template.Template) template.FuncMap {
	found := sprig.TxtFuncMap()
	found["toYaml"] = func(value interface{}) (string, error) {
		text, err := yaml.Marshal(value)
		return strings.TrimSuffix(string(text), "\n"), err
	}
	found["include"] = func(name string, data interface{}) (string, error) {
		var text strings.Builder
		err := templates.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	found["required"] = func(message string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return nil, errors.New(message)
		}
		return value, nil
	}
	return found
}

func read(file string) (object, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	found := object{}
	if err := yaml.Unmarshal(text, &found); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return found, nil
}

// merge lays more over values; null takes a key away.
func merge(values, more object) {
	for key, value := range more {
		below, isObject := value.(object)
		under, wasObject := values[key].(object)
		switch {
		case value == nil:
			delete(values, key)
		case isObject && wasObject:
			merge(under, below)
		default:
			values[key] = value
		}
	}
}
