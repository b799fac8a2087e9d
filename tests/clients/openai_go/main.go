// The openai client for Go.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/shared"
)

type outcome map[string]any

var (
	url, model, name, path = os.Args[1], os.Args[2], os.Args[3], os.Args[4]
	client                 = openai.NewClient(option.WithBaseURL(url+"/v1"), option.WithAPIKey("none-needed"))
	ctx                    = context.Background()
	messages               = []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Who is there?")}
)

func object(required []string, properties map[string]any) map[string]any {
	return map[string]any{"type": "object", "properties": properties, "required": required, "additionalProperties": false}
}

func params() openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{Model: model, Messages: messages}
}

func list() (outcome, error) {
	var names []string
	page := client.Models.ListAutoPaging(ctx)
	for page.Next() {
		names = append(names, page.Current().ID)
	}
	return outcome{"models": names}, page.Err()
}

func chat() (outcome, error) {
	answer, err := client.Chat.Completions.New(ctx, params())
	if err != nil {
		return nil, err
	}
	return outcome{"text": answer.Choices[0].Message.Content}, nil
}

func stream() (outcome, error) {
	events := client.Chat.Completions.NewStreaming(ctx, params())
	var parts []string
	for events.Next() {
		for _, choice := range events.Current().Choices {
			if choice.Delta.Content != "" {
				parts = append(parts, choice.Delta.Content)
			}
		}
		if name == "cancel" && len(parts) > 0 {
			return outcome{"text": parts[0]}, events.Close()
		}
	}
	return outcome{"parts": parts}, events.Err()
}

func tools() (outcome, error) {
	given := params()
	given.Tools = []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
		Name:       "weather",
		Parameters: object([]string{"city"}, map[string]any{"city": map[string]any{"type": "string"}}),
	})}
	answer, err := client.Chat.Completions.New(ctx, given)
	if err != nil {
		return nil, err
	}
	message := answer.Choices[0].Message
	call := message.ToolCalls[0]
	given.Messages = append(given.Messages, message.ToParam(), openai.ToolMessage("18 degrees", call.ID))
	last, err := client.Chat.Completions.New(ctx, given)
	if err != nil {
		return nil, err
	}
	return outcome{
		"tool": call.Function.Name, "arguments": call.Function.Arguments, "text": last.Choices[0].Message.Content,
	}, nil
}

func structured() (outcome, error) {
	schema := object([]string{"name", "age"}, map[string]any{
		"name": map[string]any{"type": "string"}, "age": map[string]any{"type": "integer"},
	})
	given := params()
	given.ResponseFormat.OfJSONSchema = &shared.ResponseFormatJSONSchemaParam{
		JSONSchema: shared.ResponseFormatJSONSchemaJSONSchemaParam{Name: "person", Schema: schema, Strict: openai.Bool(true)},
	}
	answer, err := client.Chat.Completions.New(ctx, given)
	if err != nil {
		return nil, err
	}
	return outcome{"object": answer.Choices[0].Message.Content}, nil
}

func embeddings() (outcome, error) {
	answer, err := client.Embeddings.New(ctx, openai.EmbeddingNewParams{
		Model: model, Input: openai.EmbeddingNewParamsInputUnion{OfArrayOfStrings: []string{"one", "two words"}},
	})
	if err != nil {
		return nil, err
	}
	var vectors [][]float64
	for _, row := range answer.Data {
		vectors = append(vectors, row.Embedding)
	}
	return outcome{"vectors": vectors}, nil
}

func upload() (outcome, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	answer, err := client.Audio.Transcriptions.New(ctx, openai.AudioTranscriptionNewParams{Model: model, File: file})
	if err != nil {
		return nil, err
	}
	return outcome{"text": answer.Text}, nil
}

func main() {
	behaviours := map[string]func() (outcome, error){
		"list": list, "chat": chat, "error": chat, "cold_start": chat, "stream": stream, "cancel": stream, "tools": tools,
		"structured": structured, "embeddings": embeddings, "upload": upload,
	}
	result, err := behaviours[name]()
	var failure *openai.Error
	if errors.As(err, &failure) && name == "error" {
		kind := fmt.Sprintf("%T", failure)
		result = outcome{"error": kind, "status": failure.StatusCode, "code": failure.Code, "message": failure.Message}
	} else if err != nil {
		panic(err)
	}
	line, _ := json.Marshal(result)
	fmt.Println(string(line))
	if name == "cancel" {
		io.Copy(io.Discard, os.Stdin)
	}
}
