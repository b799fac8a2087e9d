// Reads one form per line, as JSON with its content type and its body in base64, and prints one line of JSON per form:
// the names and values of its parts as Go's mime/multipart reads them, or an error.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"os"
)

type form struct {
	Type string `json:"type"`
	Body []byte `json:"body"`
}

type part struct {
	Name  []byte `json:"name"`
	Value []byte `json:"value"`
}

func read(one form) ([]part, error) {
	kind, params, err := mime.ParseMediaType(one.Type)
	if err != nil {
		return nil, err
	}
	if kind != "multipart/form-data" || params["boundary"] == "" {
		return nil, errors.New("not a form")
	}
	parts := []part{}
	reader := multipart.NewReader(bytes.NewReader(one.Body), params["boundary"])
	for {
		next, err := reader.NextRawPart()
		if err == io.EOF {
			return parts, nil
		}
		if err != nil {
			return nil, err
		}
		value, err := io.ReadAll(next)
		if err != nil {
			return nil, err
		}
		if next.FormName() == "" {
			return nil, errors.New("a part without a name")
		}
		parts = append(parts, part{[]byte(next.FormName()), append([]byte{}, value...)})
	}
}

func main() {
	lines := bufio.NewReader(os.Stdin)
	answers := json.NewEncoder(os.Stdout)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		var one form
		if err := json.Unmarshal(line, &one); err != nil {
			answers.Encode(map[string]string{"error": err.Error()})
			continue
		}
		if parts, err := read(one); err != nil {
			answers.Encode(map[string]string{"error": err.Error()})
		} else {
			answers.Encode(map[string][]part{"parts": parts})
		}
	}
}
